"""Every command and code block of README, tutorial and how-to pages runs, and prints what the page says.

``pytest --update-golden`` writes what was printed into the pages. ``make test-docs`` runs what is marked slow as well.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.rooms import ROOT
from tests.support.page_blocks import Run, blocks_of, difference, unmarked, with_outputs

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", DOCS / "tutorial.md", *sorted((DOCS / "how-to").glob("*.md"))]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a page: the working directory, whose modules can be imported; the checkout's examples are in it."""
    for name in ("examples", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None)
        if file and os.fspath(tmp_path) in file:
            del sys.modules[name]


def ran(page: Path, folder: Path, slow: bool, update: bool) -> list[str]:
    """Run a page; return every difference."""
    run, text = Run(folder), page.read_text()
    run.all_of(text, slow)
    if update:
        page.write_text(with_outputs(text, run.outputs))
    found = [
        (block.line, difference(block.text, printed))
        for block, printed in run.outputs
        if not update or block.is_shortened
    ]
    return [f"{page.name}, line {line}: {text}" for line, text in found if text]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs(page: Path, folder: Path, request: pytest.FixtureRequest) -> None:
    assert ran(page, folder, False, request.config.getoption("--update-golden")) == []


@pytest.mark.matrix
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(block.marker == "slow" for block in blocks_of(page.read_text()))],
    ids=lambda page: page.stem,
)
def test_a_page_runs_with_what_is_slow(page: Path, folder: Path, request: pytest.FixtureRequest) -> None:
    assert ran(page, folder, True, request.config.getoption("--update-golden")) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs_or_says_why_not(page: Path) -> None:
    assert unmarked(page.read_text()) == []


SMALL = """\
```python title="a.py"
x = 3
```

```python
from a import x
print(f"x is {x}, y is 0.25 ms")
```

```text
x is 4, y is 31 us
```

<!-- slow: for the test -->
```sh
echo slow; exit 4  # exit 4
```

```text
slow
```

<!-- not run: for the test -->
```sh
false
```

```yaml
loose: end
```
"""


def test_a_small_page(folder: Path) -> None:
    for slow in (False, True):
        run = Run(folder)
        run.all_of(SMALL, slow)
        assert [difference(block.text, printed) for block, printed in run.outputs] == [""] * (1 + slow)
    assert unmarked(SMALL) == ["28: yaml"]
    assert "x is 3, y is 0.25 ms\n```" in with_outputs(SMALL, run.outputs)


@pytest.mark.parametrize(
    ("expected", "printed", "fits"),
    [
        ("a 1 ms\n…\nb", "a  2.5 us\nc\nb\n", True),
        ("a … b", "a x b\n", True),
        ("b\na", "a\nb\n", False),
        ("a", "ab\n", False),
        ("rank 0 holds", "rank one holds\n", False),
    ],
)
def test_outputs_are_compared_loosely(expected: str, printed: str, fits: bool) -> None:
    assert (difference(expected, printed) == "") == fits


def test_a_command_that_fails_is_told(folder: Path) -> None:
    with pytest.raises(AssertionError, match="ended with 2"):
        Run(folder).all_of("```sh\npartitioner show no_such_plan.json\n```\n", slow=False)
