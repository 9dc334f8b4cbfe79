"""For every test: no calibration of the machine that happens to run it, and golden texts.

``golden("plan_small", text)`` compares with ``tests/golden/plan_small.txt``. A difference is a change of behaviour:
look at it, then accept it with ``pytest --update-golden``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

os.environ["PARTITIONER_CALIBRATION"] = "none"

FOLDER = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite tests/golden from what the code says"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with its golden file, or write the file with ``--update-golden``."""

    def check(name: str, text: str) -> None:
        file = FOLDER / f"{name}.txt"
        if request.config.getoption("--update-golden"):
            FOLDER.mkdir(exist_ok=True)
            file.write_text(text + "\n")
            return
        assert file.exists(), f"{file} is missing: run pytest --update-golden and read it"
        assert text + "\n" == file.read_text()

    return check
