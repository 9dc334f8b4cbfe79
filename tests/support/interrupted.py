"""A command line that is interrupted: run in a fork of this process, Ctrl-C sent to it at given moments.

python -m tests.support.interrupted 'MOMENT,…;MOMENT' plan gpt2 …        one JSON list of rows on stdout

One run per group of moments (seconds after it began; several: several times Ctrl-C), each with its exit code and its
stderr. Forks spare importing torch every time.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from partitioner.cli import run_command
from partitioner.commands import plan_model  # noqa: F401 - imports torch, so that every moment is within the command
from passes.interrupts import quiet_in_finalizers

MOST_SECONDS = 100.0


def interrupted(arguments: list[str], moments: list[float], folder: Path) -> dict[str, object]:
    """Run the command in a fork, and press Ctrl-C at these moments."""
    stderr = folder / "stderr"
    child = os.fork()
    if not child:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, file in ((1, os.devnull), (2, str(stderr))):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        code = 1
        try:
            with quiet_in_finalizers():
                code = run_command(arguments)
            sys.stderr.flush()
        finally:
            os._exit(code)
    began, ended, status = time.monotonic(), 0, 0
    waiting = list(moments)
    while not ended:
        spent = time.monotonic() - began
        if waiting and spent > waiting[0]:
            os.kill(child, signal.SIGINT)
            waiting.pop(0)
        if spent > MOST_SECONDS:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
        ended, status = os.waitpid(child, os.WNOHANG)
    seconds = time.monotonic() - began
    code = os.waitstatus_to_exitcode(status)
    return {"moments": moments, "code": code, "seconds": seconds, "stderr": stderr.read_text()}


def main() -> None:
    """Run all, and print the rows."""
    groups = [list(map(float, group.split(","))) for group in sys.argv[1].split(";")]
    with TemporaryDirectory() as folder:
        rows = []
        for number, group in enumerate(groups):
            arguments = [argument.replace("NUMBER", str(number)) for argument in sys.argv[2:]]
            rows.append(interrupted(arguments, group, Path(folder)))
    sys.stdout.write(json.dumps(rows))


if __name__ == "__main__":
    main()
