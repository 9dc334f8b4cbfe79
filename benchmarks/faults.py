"""Planted faults, one line each: which of checker, ``verify`` and tests finds it.

    python -m benchmarks.faults                       every fault of ``fault_table``: checker and verify
    python -m benchmarks.faults --tests               the tests of each as well
    python -m benchmarks.faults --tests-only          the tests alone
    python -m benchmarks.faults --slice 3/20          every 20th fault, from the third on
    python -m benchmarks.faults --clean               no fault: all plans must verify, and all tests pass

The output is a table in Markdown (``docs/13-planted-faults.md``).
A fault goes into a temporary copy of the checkout, never into the checkout, and a process of its own plans, checks and
verifies the plans that reach it; for faults of the engine with ``verify --train`` as well. Fails if a fault is found by
neither checker nor ``verify``, or if its text is no longer in the code.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from unittest import mock

from benchmarks.fault_table import FAULTS, Fault

ROOT = Path(__file__).parents[1]
FOLDERS = ("cost_models", "runtime", "passes", "partitioner", "benchmarks", "tests", "examples")
LIMIT_SECONDS = 600.0
"""Seconds of a process that plans and verifies, or tests; a plan whose ranks wait for ever ends with ``HANG_SECONDS``."""
HANG_SECONDS = 90.0


@dataclass(frozen=True)
class Found:
    """Who found a fault, and in which words.

    ``by``: "checker", "plan" (it was refused), "verify", "train" (``verify --train``), or "" if it is nobody.
    """

    fault: Fault
    by: str
    text: str
    tests: str = ""


# --------------------------------------------------------------------------------------------------
# In a process of its own, in the copy


def probe(names: list[str], train: bool = False) -> tuple[str, str]:
    """Plan, check and verify the plans ``names``: who finds something wrong first, and what."""
    from benchmarks.fault_plans import RANKS, planned
    from runtime.ranks.launch import WorkerPool

    with mock.patch.object(multiprocessing, "get_context", return_value=_FORK):
        pool = WorkerPool(RANKS)  # forked: torch is there already
    for name in names:
        try:
            plan, model, batch = planned(name)
        except Exception as error:  # noqa: BLE001 - whatever a fault leads to is what finds it
            checked = "check the programs" in str(error)
            return ("checker" if checked else "plan"), f"{name}: {_line(error)}"
        try:
            report = plan.verify(model, example_inputs=batch, pool=pool, timeout_seconds=HANG_SECONDS)
            if not report.passed:
                worst = report.differences[0]
                return "verify", f"{name}: {worst.kind} {worst.name} differs by {worst.error:.1e}"
        except Exception as error:  # noqa: BLE001 - as above
            return "verify", f"{name}: {_line(error)}"
        if not train:
            continue
        try:
            trained = plan.verify(
                model, example_inputs=batch, train=True, pool=pool, timeout_seconds=HANG_SECONDS
            )
            if not trained.passed:
                return "train", f"{name}: {trained.first_difference}"
        except Exception as error:  # noqa: BLE001 - as above
            return "train", f"{name}: {_line(error)}"
    return "", ""


def failed_tests(arguments: list[str]) -> tuple[str, str]:
    """Run pytest with ``arguments``: ("found", …) if a test fails, ("", …) if all pass, else ("error", …)."""
    import pytest

    with mock.patch.object(multiprocessing, "get_context", return_value=_FORK):
        code = int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", *arguments]))
    return {0: "", 1: "found"}.get(code, "error"), f"pytest ended with {code}"


_FORK = multiprocessing.get_context("fork")


def _line(error: Exception) -> str:
    because = getattr(error, "because", ())
    return f"{getattr(error, 'what', str(error))} {because[0] if because else ''}".replace("\n", " ")[:160]


# --------------------------------------------------------------------------------------------------


def stay_forkable() -> None:
    """Import torch, which forked processes have then, and let autograd start no threads, which they would not have.

    Of a torch built for GPUs it starts some, on machines without one, if a process's first backward is on fake tensors.
    """
    import torch

    torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


@contextmanager
def copied_checkout() -> Iterator[Path]:
    """Copy the code into a temporary folder, and remove it in the end."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for name in FOLDERS:
            shutil.copytree(ROOT / name, Path(folder) / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", folder)
        yield Path(folder)


@contextmanager
def planted(fault: Fault, folder: Path) -> Iterator[None]:
    """Put the fault into the copy, and take it out again."""
    file = folder / fault.file
    text = file.read_text()
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.file} has {text.count(fault.old)} times, not once: {fault.old!r}")
    file.write_text(text.replace(fault.old, fault.new))
    try:
        yield
    finally:
        file.write_text(text)


def run_probe(folder: Path, names: tuple[str, ...], train: bool = False) -> tuple[str, str]:
    """Run ``probe`` in ``folder``. A process that gives no answer counts as found by ``verify``, which has time limits."""
    return _run_in(folder, "verify", "probe", list(names), train)


def run_tests(folder: Path, test: str) -> str:
    """Run the tests of a fault in ``folder``: "found", "" if all pass, "hangs" or "error"."""
    return _run_in(folder, "hangs", "failed_tests", test.split("|"))[0]


def _run_in(folder: Path, silent: str, name: str, *arguments: object) -> tuple[str, str]:
    """Call this file's function ``name`` in a process forked from this one, with the code of ``folder``.

    It has torch already, but none of the project's code but this. ``silent``: by whom it is found if there is no answer.
    """
    context = multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)
    child = context.Process(target=_called_in, args=(writing, folder, name, arguments))
    child.start()
    writing.close()
    try:
        if not reading.poll(LIMIT_SECONDS):
            return silent, f"no answer within {LIMIT_SECONDS:g} s"
        by, text = json.loads(reading.recv_bytes())
    except EOFError:
        return silent, "the process died"
    finally:
        assert child.pid is not None
        with suppress(ProcessLookupError):  # it died before it led a group of its own
            os.killpg(child.pid, signal.SIGKILL)
        child.join()
        reading.close()
    return by, text


def _called_in(writing: Connection, folder: Path, name: str, arguments: tuple[object, ...]) -> None:
    """Be the forked process: import the checkout in ``folder``, and send what its function ``name`` finds."""
    import torch

    os.setsid()
    try:
        os.chdir(folder)
        sys.path.insert(0, str(folder))
        for module in [m for m in sys.modules if m.partition(".")[0] in FOLDERS]:
            for held in vars(sys.modules.pop(module)).values():
                if isinstance(held, torch.library.Library):
                    held._destroy()  # the module defines its ops anew
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        from benchmarks import faults

        found = getattr(faults, name)(*arguments)
    except BaseException as error:  # noqa: BLE001 - the parent must hear of whatever it is
        found = ("plan", _line(error if isinstance(error, Exception) else RuntimeError(repr(error))))
    writing.send_bytes(json.dumps(found).encode())
    os._exit(0)


def try_fault(fault: Fault, folder: Path, verified: bool = True, tests: bool = False) -> Found:
    """Plant a fault and see who finds it."""
    with planted(fault, folder):
        by, text = run_probe(folder, fault.plans, fault.needs_train) if verified else ("", "")
        return Found(fault, by, text, run_tests(folder, fault.test) if tests else "")


def without_faults(folder: Path, verified: bool, tests: bool) -> int:
    """Verify all plans and run all tests without any fault; return how many fail."""
    failed = 0
    for name in dict.fromkeys(name for fault in FAULTS for name in fault.plans) if verified else ():
        by, text = run_probe(folder, (name,), any(name in f.plans for f in FAULTS if f.needs_train))
        failed += bool(by)
        print(f"{name:12} {by or 'verified'} {text}", flush=True)
    for test in dict.fromkeys(fault.test for fault in FAULTS) if tests else ():
        found = run_tests(folder, test)
        failed += bool(found)
        print(f"{found or 'passes':8} {test}", flush=True)
    return failed


def main() -> int:
    """Try the faults of the command line; 1 if one is found by nobody."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--slice", default="1/1")
    options.add_argument("--only", default="", help="faults of which the words hold this")
    options.add_argument("--tests", action="store_true")
    options.add_argument("--tests-only", action="store_true")
    options.add_argument("--clean", action="store_true")
    given = options.parse_args()
    os.environ["PARTITIONER_CALIBRATION"] = "none"
    stay_forkable()

    missed, begun = 0, time.perf_counter()
    verified, tests = not given.tests_only, given.tests or given.tests_only
    first, step = map(int, given.slice.split("/"))
    chosen = [fault for fault in FAULTS if given.only in fault.wrong][first - 1 :: step]
    with copied_checkout() as folder:
        if given.clean:
            return 1 if without_faults(folder, verified, tests) else 0
        print(f"| {'area':15} | {'fault':50} | found by | tests | what was said\n|---|---|---|---|---")
        for fault in chosen:
            found = try_fault(fault, folder, verified, tests)
            missed += verified and not found.by
            by = found.by or ("**nobody**" if verified else "")
            said = found.text[:110].replace("|", "/")
            print(f"| {fault.area:15} | {fault.wrong:50} | {by:8} | {found.tests:5} | {said}", flush=True)
    print(
        f"{len(chosen)} faults, {missed} found by neither checker nor verify; {time.perf_counter() - begun:.0f} s"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
