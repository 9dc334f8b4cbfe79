"""The code blocks of a page, run in order in one folder, and what they print compared with what the page says.

```python title="model.py"       a file of that name (likewise yaml, json, toml, text, xml)
```python                        run; all blocks of a page share their variables
```sh                            run, command by command; ``# exit 4`` behind a command: it ends with this code
```text                          right behind one that is run: its output
```                              a drawing, no code

Above a block may stand why it is run by ``make test-docs`` only, or not at all (then nor is what it prints compared):

<!-- slow: starts two processes -->
<!-- not run: needs two machines -->

Outputs agree if the page's lines are in what was printed, in this order. A line ``…`` stands for any lines, ``…`` in a line
for any text, and all numbers (with their units) are equal: seconds differ from machine to machine.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.rooms import ROOT
from partitioner.cli import run_command

FENCE = re.compile(
    r"(?ms)^(?:<!-- (?P<marker>slow|not run): (?P<reason>[^\n]*?) -->\n+)?"
    r"```(?P<language>\w*)(?: title=\"(?P<title>[^\"\n]+)\")?[^\n]*\n(?P<text>.*?)^```[ ]*$"
)
FILES = ("python", "yaml", "json", "toml", "text", "xml")
SHELL = re.compile(r"[|<>&;$`*?()\n]")
"""Characters for which a command needs a shell."""
NUMBER = re.compile(r"[+-]?\d[\d.,]*(?:e[+-]?\d+)?(?: ?(?:ns|us|µs|ms|s|B|KiB|MiB|GiB|TiB|x|%)(?!\w))?")
SECONDS_PER_COMMAND = 300.0
LONGEST_DIFFERENCE = 4000
"""Characters of an output that an error shows."""


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; ``marker`` is "slow", "not run" or ""."""

    language: str
    title: str
    text: str
    marker: str
    line: int
    start: int
    """The place of ``text`` in the page."""
    follows: bool
    """True if nothing but blank lines are between it and the block before it."""

    @property
    def is_shortened(self) -> bool:
        """Tell whether it is an output of which lines are left out."""
        return "…" in self.text.splitlines()

    @property
    def is_output(self) -> bool:
        """Tell whether it is what the block before it prints."""
        return self.language == "text" and self.follows and not self.title


def blocks_of(page: str) -> list[Block]:
    """Return all blocks of a page in order."""
    found = []
    end = 0
    for match in FENCE.finditer(page):
        found.append(
            Block(
                match["language"],
                match["title"] or "",
                match["text"],
                match["marker"] or "",
                page.count("\n", 0, match.start("language")) + 1,
                match.start("text"),
                bool(found) and not page[end : match.start()].strip(),
            )
        )
        end = match.end()
    return found


def unmarked(page: str) -> list[str]:
    """Return the blocks that are neither run, nor a file, an output or a drawing, nor marked, as ``line: language``."""
    found = []
    for block in blocks_of(page):
        known = block.language in ("python", "sh") or (block.title and block.language in FILES)
        drawing = not block.language and not re.search(
            r"(?m)^(\$|partitioner|torchrun|import|from) ", block.text
        )
        if not (known or drawing or block.is_output or block.marker):
            found.append(f"{block.line}: {block.language}")
    return found


@dataclass
class Run:
    """A run of one page. ``outputs``: what was printed, by the block of the page that should say so."""

    folder: Path
    names: dict[str, Any] = field(default_factory=dict)
    outputs: list[tuple[Block, str]] = field(default_factory=list)

    def all_of(self, page: str, slow: bool) -> None:
        """Run a page; without ``slow`` all but what is marked so."""
        printed: str | None = None
        for block in blocks_of(page):
            if block.is_output:
                if printed is not None:
                    self.outputs.append((block, printed))
            elif block.marker == "not run" or (block.marker == "slow" and not slow):
                printed = None
            else:
                printed = self.one(block)

    def one(self, block: Block) -> str | None:
        """Run one block; return what it printed, None of a file."""
        if block.title:
            path = self.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)
            return None
        try:
            if block.language == "python":
                code = compile(block.text, f"<line {block.line} of the page>", "exec")
                with captured() as streams:
                    exec(code, self.names)
                return said(*streams)
            if block.language == "sh":
                return "".join(self.command(text) for text in commands_of(block.text))
        except Exception as error:
            error.add_note(f"in the block of line {block.line}:\n{block.text}")
            raise
        return None

    def command(self, text: str) -> str:
        """Run one command: ours in this process, where torch is imported already, all others in a shell."""
        code = re.search(r"# exit (\d+)$", text)
        bare = re.sub(r"\s+# .*$", "", text).replace("\\\n", " ")
        if bare.startswith("partitioner ") and not SHELL.search(bare):
            with captured() as streams:
                ended = run_command(shlex.split(bare)[1:])
            output, errors = (stream.getvalue() for stream in streams)
        else:
            done = subprocess.run(
                ["bash", "-o", "pipefail", "-c", text],
                cwd=self.folder,
                env=environment(),
                capture_output=True,
                text=True,
                timeout=SECONDS_PER_COMMAND,
                check=False,
            )
            ended, output, errors = done.returncode, done.stdout, done.stderr
        assert ended == (int(code[1]) if code else 0), f"{text} ended with {ended}:\n{output}{errors}"
        return said(io.StringIO(output), io.StringIO(errors))


def commands_of(text: str) -> list[str]:
    """Split a block into its commands; a line may go on after a backslash."""
    found = re.findall(r"^((?:.*\\\n)*.*)$", text, re.MULTILINE)
    return [command.strip() for command in found if command.strip() and not command.startswith("#")]


@contextlib.contextmanager
def captured() -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """Yield what stdout and stderr get meanwhile."""
    streams = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        yield streams


def said(output: io.StringIO, errors: io.StringIO) -> str:
    """Put output before errors; progress lines are left out."""
    kept = [line for line in errors.getvalue().splitlines() if " … " not in line]
    return "".join(f"{part.rstrip()}\n" for part in (output.getvalue(), "\n".join(kept)) if part.strip())


def environment() -> dict[str, str]:
    """Return the environment of commands: this checkout, this Python, no calibration of this machine."""
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(ROOT),
        "PARTITIONER_CALIBRATION": "none",
        "PARTITIONER_CACHE": "none",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def difference(expected: str, printed: str) -> str:
    """Return the first line of the page that was not printed in its place, and what was; "" if all were."""
    lines = [loose(line) for line in printed.splitlines()]
    at = 0
    for line in expected.splitlines():
        if line.strip() in ("", "…"):
            continue
        pattern = ".*".join(re.escape(part) for part in loose(line).split("…"))
        while at < len(lines) and not re.fullmatch(pattern, lines[at]):
            at += 1
        if at == len(lines):
            return f"the page says:  {line}\nprinted was:\n{printed[:LONGEST_DIFFERENCE]}"
        at += 1
    return ""


def loose(line: str) -> str:
    """Return a line with all numbers and widths equal."""
    return " ".join(NUMBER.sub("#", line).split())


def with_outputs(page: str, outputs: list[tuple[Block, str]]) -> str:
    """Return the page with outputs as they were printed; those that are shortened are left to people."""
    for block, printed in sorted(outputs, key=lambda output: -output[0].start):
        if not block.is_shortened:
            page = page[: block.start] + printed + page[block.start + len(block.text) :]
    return page
