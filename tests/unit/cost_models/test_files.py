"""Files that are replaced: never half of one, whoever writes or fails meanwhile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cost_models.files import replace_file


def test_a_write_that_fails_leaves_the_previous_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    replace_file(file, "before")
    with pytest.raises(UnicodeEncodeError):
        replace_file(file, "half \ud800")
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


def test_readers_see_one_of_the_files_that_several_write(tmp_path: Path) -> None:
    file = tmp_path / "file"
    texts = [letter * 100_000 for letter in "abc"]
    replace_file(file, texts[0])
    with ThreadPoolExecutor(4) as pool:
        writes = [pool.submit(replace_file, file, text) for text in texts * 20]
        while not all(write.done() for write in writes):
            assert file.read_text() in texts
        for write in writes:
            write.result()
    assert list(tmp_path.iterdir()) == [file]
