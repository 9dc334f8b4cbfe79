"""A ``runtime.py`` of the user's must not hide our package without a word."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from partitioner.shadowing import PACKAGES, refuse_shadowed_packages

ROOT = Path(__file__).parents[3]


def imported_from(folder: Path) -> subprocess.CompletedProcess[str]:
    """``import partitioner`` as a user's script does it: its own folder comes first."""
    return subprocess.run(
        [sys.executable, "-c", "import partitioner; print('imported')"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", PACKAGES)
def test_a_file_that_hides_a_package_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("")
    done = imported_from(tmp_path)
    assert done.returncode == 1
    assert f"{name}: {tmp_path / name}.py hides {ROOT / name}" in done.stderr
    assert "try: rename the file or folder" in done.stderr


def test_a_folder_that_hides_a_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "passes").mkdir()
    (tmp_path / "passes" / "__init__.py").write_text("")
    assert f"passes: {tmp_path}/passes/__init__.py hides" in imported_from(tmp_path).stderr


def test_other_files_hide_nothing(tmp_path: Path) -> None:
    (tmp_path / "my_runtime.py").write_text("")
    assert imported_from(tmp_path).stdout == "imported\n"


def test_packages_elsewhere_are_refused_all_at_once(tmp_path: Path) -> None:
    with pytest.raises(ImportError) as caught:
        refuse_shadowed_packages(tmp_path)
    assert str(caught.value).count(" hides ") == len(PACKAGES)
