"""``partitioner``: the command line. Parse, call one function, render, return a code.

stdout is data, stderr is progress and errors. Exit codes:
    0 ok   1 internal   2 usage (bad files and flags)   3 model or trace   4 infeasible
    5 time limit (plan still written)   6 rank failure   7 verification differs
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Sequence

import cyclopts

from cost_models.errors import PartitionerError, UsageError
from partitioner.commands import calibrate, graph, plan, plan_files, run, verify

app = cyclopts.App(
    name="partitioner",
    help="Plan, prove, verify and run model-parallel training.",
    version_flags=["--version"],
    result_action="return_value",
)
app.command(plan.plan)
app.command(plan_files.show)
app.command(plan_files.diff)
app.command(plan_files.simulate)
app.command(verify.verify)
app.command(run.run)
app.command(calibrate.calibrate)
app.command(graph.graph)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the ``partitioner`` command; ends the process with the exit code."""
    sys.exit(run_command(list(sys.argv[1:] if arguments is None else arguments)))


def run_command(arguments: list[str]) -> int:
    """Run one command and return its exit code. Errors go to stderr; tracebacks only with ``--debug``."""
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, stream=sys.stderr)
    try:
        result = app(arguments, exit_on_error=False, print_error=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except PartitionerError as error:
        return _report(error, debug)
    except cyclopts.CycloptsError as error:
        help_text = "see `partitioner --help`, or `partitioner COMMAND --help`"
        return _report(UsageError("cannot read the command line", [str(error)], [help_text]), debug)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader of our output went away
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # noqa: BLE001 - the last resort must name the bug and not drown it in a traceback
        if debug:
            traceback.print_exc()
        print(f"error[internal]: {type(error).__name__}: {error}", file=sys.stderr)
        print("  try: run again with --debug and report the traceback", file=sys.stderr)
        return 1


def _report(error: PartitionerError, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(error.render(), file=sys.stderr)
    return error.exit_code
