"""``partitioner``: the command line. Parse, call one function, render, return a code.

stdout is data, stderr is progress and errors. Exit codes:
    0 ok   1 internal   2 usage (bad files and flags)   3 model or trace   4 infeasible
    5 time limit (plan still written)   6 rank failure   7 verification differs   130 interrupted, no plan
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module

import cyclopts

from cost_models.errors import PartitionerError, UsageError
from partitioner.commands.options import discard_stdout, progress, report
from partitioner.doctor.findings import version_text
from partitioner.unforeseen import internal_error
from passes.interrupts import quiet_in_finalizers
from runtime.collector import collector_paused

COMMANDS = {
    "plan": (
        "plan:plan",
        "Plan how a model trains on a cluster.",
        "MODEL --cluster C --batch-size N [OPTIONS]",
    ),
    "fit": (
        "fit:fit",
        "Find the largest batch, or sequence, that fits.",
        "MODEL… --cluster C:1,2,4 [OPTIONS]",
    ),
    "show": ("plan_files:show", "Print a plan file.", "PLAN"),
    "diff": ("plan_files:diff", "Print what differs between two plan files.", "PLAN PLAN"),
    "report": ("report:report", "Draw a plan, or two, as one HTML file.", "PLAN [PLAN] -o FILE"),
    "simulate": ("plan_files:simulate", "Simulate a plan's step and draw its timeline.", "PLAN [OPTIONS]"),
    "verify": ("verify:verify", "Compare a plan with the unpartitioned model.", "PLAN MODEL [OPTIONS]"),
    "run": ("run:run", "Train some steps with a plan.", "PLAN MODEL --steps N [--local] [OPTIONS]"),
    "compare": (
        "compare:compare",
        "Lay the profile of a real run over a plan's prediction.",
        "PLAN TRACE [OPTIONS]",
    ),
    "cluster": (
        "cluster:cluster",
        "Write a cluster file from what machines and tools print.",
        "[--topo FILE] [--gpus FILE] [--nccl-xml FILE] [OPTIONS] [-o FILE]",
    ),
    "calibrate": ("calibrate:calibrate", "Measure this machine.", "[OPTIONS]"),
    "graph": (
        "graph:graph",
        "Draw a model's ops, a plan's stages, or what a rank runs.",
        "MODEL|PLAN [--plan PLAN --rank N] [OPTIONS] > FILE",
    ),
    "explain": (
        "explain:explain",
        "Say what else an op or parameter could have been, and what that costs.",
        "PLAN NAME [--model MODEL] [OPTIONS]",
    ),
    "export": (
        "formats:export",
        "Write a plan as another tool's configuration.",
        "PLAN --to TOOL [-o FOLDER]",
    ),
    "check": (
        "formats:check",
        "Check a configuration of another tool.",
        "FILE --model MODEL --cluster C [OPTIONS]",
    ),
    "doctor": ("doctor:doctor", "Say what is on this machine, and what will not work on it.", "[OPTIONS]"),
}
"""Commands by name: where each lives, what the overview says of it, how it is called. Imported only when called."""

GRAPH_COMMAND = "plan-graph"
"""The name within the command line of what people write as ``plan --graph``."""
GRAPH_USAGE = (
    "Usage: partitioner plan --graph FILE --strategy free|feature [--contiguous] [--devices N] "
    "[--objective throughput|latency] [OPTIONS]"
)

EPILOGUE = """\
Start with `partitioner plan gpt2 --set size=tiny --cluster local:2 --batch-size 8`

Exit codes: 0 ok, 1 internal error, 2 usage (bad files and flags), 3 model or trace, 4 does not fit,
5 time limit (the plan is still written), 6 a rank failed, 7 verification differs, 130 interrupted without a plan.

Everywhere: `--json` prints one JSON object on stdout; `--debug` adds tracebacks and logs on stderr."""

app = cyclopts.App(
    name="partitioner",
    help="Plan, prove, verify and run model-parallel training.",
    help_epilogue=EPILOGUE,
    help_format="markdown",
    version=version_text,
    version_flags=["--version"],
    default_parameter=cyclopts.Parameter(negative=()),
    result_action="return_value",
)
for _position, (_name, (_place, _help, _usage)) in enumerate(COMMANDS.items()):
    app.command(
        f"partitioner.commands.{_place}",
        name=_name,
        help=_help,
        usage=f"Usage: partitioner {_name} {_usage}",
        help_epilogue="",
        sort_key=_position,
    )
app.register_install_completion_command(
    help="Complete commands and options in this shell: bash, zsh or fish."
)
app.command(
    "partitioner.commands.plan_graph:plan",
    name=GRAPH_COMMAND,
    show=False,
    usage=GRAPH_USAGE,
    help_epilogue="",
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the ``partitioner`` command, and end the process with its exit code."""
    _open_closed_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    _quieten("--debug" in given)
    with quiet_in_finalizers():
        code = run_command(given)
    gc.freeze()  # else the collector walks all of torch's and the graph's objects once more before the process ends
    sys.exit(code)


def run_command(arguments: list[str]) -> int:
    """Run one command and return its exit code. Errors go to stderr; tracebacks only with ``--debug``."""
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        if _is_graph_call(arguments):
            called = [GRAPH_COMMAND, *arguments[1:]]
        else:
            called = arguments
            _import_command(arguments)
        result = app(called, exit_on_error=False, print_error=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except PartitionerError as error:
        return _failed(error, arguments, debug)
    except cyclopts.CycloptsError as error:
        return _failed(_usage_error(error, arguments), arguments, debug)
    except BrokenPipeError:
        discard_stdout()  # the reader of our output went away
        return 0
    except (KeyboardInterrupt, SystemExit):
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # noqa: BLE001 - the last resort must name the bug and not drown it in a traceback
        found = internal_error(error, "run again with --debug and report the traceback")
        return _failed(found, arguments, debug)


def _is_graph_call(arguments: Sequence[str]) -> bool:
    """Tell whether ``plan`` is asked to place a cost graph."""
    return arguments[:1] == ["plan"] and any(
        argument == "--graph" or argument.startswith("--graph=") for argument in arguments
    )


def _open_closed_streams() -> None:
    """Put the null device where the caller closed a stream, before another file takes its descriptor."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 - it stays open as long as the process
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _quieten(debug: bool) -> None:
    """Keep third parties' chatter off the terminal, ours below a warning too; all of it comes with ``--debug``."""
    logging.basicConfig(level=logging.WARNING if debug else logging.ERROR, stream=sys.stderr)
    logging.getLogger("partitioner").setLevel(logging.DEBUG if debug else logging.WARNING)
    if not debug:
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        os.environ.setdefault("PYTHONWARNINGS", "ignore")  # for worker processes
        warnings.simplefilter("ignore")


def _import_command(arguments: Sequence[str]) -> None:
    """Import what the command needs, with a line that says so: torch alone takes a second or more."""
    name = next((argument for argument in arguments if not argument.startswith("-")), None)
    if name in COMMANDS:
        # The collector would walk all of torch's objects again and again.
        with progress("importing torch", quiet="--quiet" in arguments), collector_paused():
            import_module(f"partitioner.commands.{COMMANDS[name][0].partition(':')[0]}")


def _usage_error(error: cyclopts.CycloptsError, arguments: Sequence[str]) -> UsageError:
    command = arguments[0] if arguments and arguments[0] in COMMANDS else "COMMAND"
    if isinstance(error, cyclopts.UnusedCliTokensError):
        text = f"there are more arguments than it takes: {' '.join(error.unused_tokens or ())}"
    else:
        text = " ".join(str(error).split()).replace(f'"{GRAPH_COMMAND}"', '"plan"')
    usage = [] if command == "COMMAND" else [f"partitioner {command} {COMMANDS[command][2]}"]
    return UsageError("cannot read the command line", [text], [*usage, f"partitioner {command} --help"])


def _failed(error: PartitionerError, arguments: Sequence[str], debug: bool) -> int:
    """Report an error on stderr; with ``--json`` on stdout as well, where nothing was printed before."""
    if debug:
        traceback.print_exc()
    if "--json" in arguments:
        details = {
            "kind": error.kind,
            "what": error.what,
            "because": list(error.because),
            "try": list(error.suggestions),
        }
        print(json.dumps({"error": details, "exit_code": error.exit_code}, indent=1), flush=True)
    return report(error)
