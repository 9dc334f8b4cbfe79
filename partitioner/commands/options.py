"""The options and the output that the commands share."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from cost_models.errors import PartitionerError, UsageError
from cost_models.shown import printable
from partitioner.report.text import coloured, terminal_width, text_within
from passes.progress import is_watched, report_phase

if TYPE_CHECKING:  # these import torch, which takes seconds
    from cost_models.precision import Precision
    from partitioner.models.workload import Workload

SECONDS_BEFORE_PROGRESS = 1.0


def _whole(_: Any, tokens: Sequence[Any]) -> int:
    """Read digits only: cyclopts itself would read 2.5 as 2."""
    text = tokens[0].value
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise ValueError(f"{text!r} is not a whole number")
    return int(text)


WholeNumber = Annotated[int, Parameter(converter=_whole)]
Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
JsonFlag = Annotated[Flag, Parameter(name="--json", help="Print one JSON object.")]
QuietFlag = Annotated[Flag, Parameter(name="--quiet", help="Say nothing on stderr but errors.")]
OutputFile = Annotated[Path | None, Parameter(name=["--output", "-o"])]
Settings = Annotated[tuple[str, ...], Parameter(name="--set", negative=(), show_default=False)]

Clusters = Annotated[tuple[str, ...], Parameter(negative=())]
Dims = Annotated[tuple[str, ...], Parameter(negative=(), show_default=False)]


@Parameter(name="*")
@dataclass(frozen=True)
class ModelOptions:
    """The options of a model, beside its name.

    Parameters
    ----------
    seq
        Sequence length of a bundled or hf: model.
    dtype
        Data type of a bundled or hf: model, such as bfloat16.
    set_
        key=value for the factory's arguments; may be repeated.
    """

    seq: WholeNumber | None = None
    dtype: str | None = None
    set_: Settings = ()

    def load(self, model: str) -> Workload:
        """Load the workload that ``model`` names."""
        from partitioner.models.load import load_workload

        return load_workload(model, settings=settings(self.set_), seq=self.seq, dtype=self.dtype)


@Parameter(name="*")
@dataclass(frozen=True)
class PlannedModelOptions(ModelOptions):
    """The options of the model that a plan was made for.

    Parameters
    ----------
    batch_dims
        As given to `partitioner plan`.
    dynamic_dims
        As given to `partitioner plan`.
    """

    batch_dims: Dims = ()
    dynamic_dims: Dims = ()

    def dims(self) -> dict[str, Any]:
        """Read the batch dimensions and the open ones."""
        return {
            "batch_dims": batch_dims(self.batch_dims),
            "dynamic_dims": dynamic_dims(self.dynamic_dims),
        }


NOTHING_GIVEN = PlannedModelOptions()


@contextmanager
def progress(what: str, *, quiet: bool = False) -> Iterator[None]:
    """Say on stderr what is being done: in a live line on a terminal, elsewhere once it takes more than a second.

    The prints of the work (of a user's factory, a library, a worker process) go to stderr: stdout is data.
    """
    quiet = quiet or os.environ.get("RANK", "0") != "0"  # under torchrun, one voice is enough
    with _live_line(quiet):
        if is_watched():
            report_phase(what)
            with _stdout_to_stderr():
                yield
        else:
            with _told_late(what, quiet):
                yield


def _live_line(quiet: bool) -> AbstractContextManager[None]:
    if quiet or is_watched() or not sys.stderr.isatty():
        return nullcontext()
    from partitioner.report.live import live_line  # it imports rich

    return live_line()


@contextmanager
def _told_late(what: str, quiet: bool) -> Iterator[None]:
    """Say what is being done if it takes more than a second, and at its end how long it took."""
    started = time.monotonic()
    said = threading.Event()
    stderr = sys.stderr  # the work may redirect it for itself

    def say() -> None:
        print(f"{what} … ", end="", file=stderr, flush=True)
        said.set()

    timer = threading.Timer(SECONDS_BEFORE_PROGRESS, say)
    timer.daemon = True
    if not quiet:
        timer.start()
    outcome = "stopped"
    try:
        with _stdout_to_stderr():
            yield
        outcome = f"{time.monotonic() - started:.1f} s"
    finally:
        timer.cancel()
        if timer.ident is not None:
            timer.join()
        if said.is_set():
            print(outcome, file=stderr, flush=True)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirect ``sys.stdout`` and file descriptor 1, which C libraries and child processes write to directly."""
    if sys.stdout is not None:
        sys.stdout.flush()
    try:
        saved = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # one of the two is closed, so there is nothing to mix up
        with redirect_stdout(sys.stderr):
            yield
        return
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def emit(result: object, data: Mapping[str, Any], as_json: bool) -> None:
    """Print the result: one JSON object and nothing else with ``--json``, else its text, as wide as the terminal."""
    try:
        if as_json:
            print(json.dumps(data, indent=1), flush=True)
        else:
            with text_within(terminal_width()):
                text = str(result)
            print(coloured(printable(text)), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_stdout()
        raise UsageError("cannot write the result to stdout", [str(error.strerror)]) from error


def discard_stdout() -> None:
    """Throw away what is still buffered: nobody reads on, or nothing can be written."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def report(error: PartitionerError) -> int:
    """Print an error on stderr and return its exit code."""
    print(printable(error.render()), file=sys.stderr, flush=True)
    return error.exit_code


def _refuse(flag: str, problems: Sequence[str], suggestion: str) -> None:
    if problems:
        raise UsageError(f"cannot read {flag}", problems, [suggestion])


def settings(pairs: Sequence[str], flag: str = "--set") -> dict[str, str]:
    """Read settings: ``["size=tiny"]`` -> ``{"size": "tiny"}``; every malformed pair is collected before raising."""
    problems = [f"{pair!r} is not key=value" for pair in pairs if "=" not in pair or pair.startswith("=")]
    keys = [pair.split("=", 1)[0] for pair in pairs]
    problems += [f"{key} is given twice" for key in dict.fromkeys(keys) if keys.count(key) > 1]
    _refuse(flag, problems, f"write {flag} key=value, once per key")
    return dict(pair.split("=", 1) for pair in pairs)


def pins(pairs: Sequence[str], strategy: str) -> dict[str, int] | dict[str, str]:
    """Read pins: ``["transformer.h.0.*=1"]`` -> ``{"transformer.h.0.*": 1}``; a glob may itself contain ``=``.

    For strategy "feature": ``["*.up_proj.weight=S0,R"]`` -> ``{"*.up_proj.weight": "S0 R"}``. For "auto": stages if all are
    numbers.
    """
    found: dict[str, str] = {}
    problems = []
    numbers = strategy == "auto" and all(_is_stage(pair.rpartition("=")[2]) for pair in pairs)
    what = "STAGE" if numbers else {"layer": "STAGE", "free": "DEVICE"}.get(strategy, "LAYOUT")
    for pair in pairs:
        glob, _, text = pair.rpartition("=")
        text = text.replace(",", " ") if what == "LAYOUT" else str(int(text)) if _is_stage(text) else text
        if not glob:
            problems.append(f"{pair!r} is not GLOB={what}")
        elif what != "LAYOUT" and not _is_stage(text):
            problems.append(f"{pair!r}: the {what.lower()} {text!r} is not a number from 0 up")
        elif found.setdefault(glob, text) != text:
            word = what.lower()
            problems.append(f"{glob!r} is pinned to {word} {found[glob]} and to {word} {text}")
    _refuse("--pin", problems, f"write --pin 'module.glob.*={what}', once per glob")
    return found if what == "LAYOUT" else {glob: int(text) for glob, text in found.items()}


def _is_stage(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 7


def block_sizes(pairs: Sequence[str]) -> dict[str, tuple[int, ...]] | None:
    """Read splits: ``["mlp=60,40"]`` -> ``{"mlp": (60, 40)}``; ``["none"]`` -> ``{}``; None if nothing is given."""
    if list(pairs) == ["none"]:
        return {}
    found: dict[str, tuple[int, ...]] = {}
    problems = []
    for pair in pairs:
        glob, _, text = pair.rpartition("=")
        if not glob or not re.fullmatch(r"[1-9][0-9]{0,8}(,[1-9][0-9]{0,8})*", text):
            problems.append(f"{pair!r} is not NAME=SIZE,SIZE")
        elif found.setdefault(glob, sizes := tuple(map(int, text.split(",")))) != sizes:
            problems.append(f"{glob!r} is split in two ways")
    _refuse("--split", problems, "write --split 'mlp=60,40', once per name")
    return found or None


def mesh_shape(text: str | None) -> tuple[int, ...] | None:
    """Read the shape of a mesh: "8x4" -> (8, 4)."""
    if text is None:
        return None
    if not re.fullmatch(r"[1-9][0-9]{0,6}([x,×][1-9][0-9]{0,6})*", text):
        raise UsageError("cannot read --mesh", [f"{text!r} is not sizes such as 8x4"])
    return tuple(map(int, re.split("[x,×]", text)))


def cluster_texts(texts: Sequence[str]) -> list[str]:
    """List clusters one by one, none twice: ``["H100-80GB:1,2", "local:2"]`` -> H100-80GB:1, H100-80GB:2, local:2."""
    every: list[str] = []
    for text in texts:
        name, _, numbers = text.rpartition(":")
        several = re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})+", numbers)
        every += [f"{name}:{number}" for number in numbers.split(",")] if several else [text]
    return list(dict.fromkeys(every))


def read_precision(text: str | None) -> Precision:
    """Read a precision: "compute=bf16,master=fp32" -> Precision(compute=bfloat16, master=float32)."""
    from cost_models.precision import Precision

    return Precision.from_fields(settings(text.split(","), "--precision") if text else {})


def batch_dims(pairs: Sequence[str]) -> dict[str, int | None] | None:
    """Read batch dimensions: ``["mask=none", "ids=0"]`` -> ``{"mask": None, "ids": 0}``; None if nothing was said."""
    given = settings(pairs, "--batch-dims")
    wrong = [
        f"{n}={text}: expected a dimension or none" for n, text in given.items() if not _is_dim(text, "none")
    ]
    _refuse("--batch-dims", wrong, "write --batch-dims NAME=DIM, once per input")
    return {name: None if text == "none" else int(text) for name, text in given.items()} or None


def dynamic_dims(pairs: Sequence[str]) -> dict[str, list[int]] | None:
    """Read open dimensions: ``["ids=1", "mask=1,2"]`` -> ``{"ids": [1], "mask": [1, 2]}``; None if nothing was said."""
    given = settings(pairs, "--dynamic-dims")
    wrong = [
        f"{name}={text}: expected dimensions such as 1,2"
        for name, text in given.items()
        if not all(map(_is_dim, text.split(",")))
    ]
    _refuse("--dynamic-dims", wrong, "write --dynamic-dims NAME=DIM,DIM, once per input")
    return {name: [int(dim) for dim in text.split(",")] for name, text in given.items()} or None


def _is_dim(text: str, *words: str) -> bool:
    return text in words or re.fullmatch(r"-?[0-9]{1,3}", text) is not None


def microbatch_count(text: str) -> int | str:
    """Read "auto" or a positive number."""
    if text == "auto":
        return "auto"
    if not (text.isascii() and text.isdigit() and len(text) < 12) or int(text) < 1:
        raise UsageError(
            "cannot read --microbatches", because=[f"{text!r} is neither auto nor a number from 1 up"]
        )
    return int(text)


def chance(text: str) -> float:
    """Read a chance: "5%" or "0.05" -> 0.05."""
    number = re.fullmatch(r"([+-]?[0-9]{1,9}(?:\.[0-9]{1,18})?)(%?)", text)
    if number is None:
        raise UsageError("cannot read --risk", [f"{text!r} is no chance such as 5% or 0.05"])
    return float(number[1]) / (100 if number[2] else 1)


def rank_list(text: str | None, world_size: int) -> list[int] | None:
    """Read ranks: "0,8-10" -> [0, 8, 9, 10]; "all"; None if nothing is said."""
    if text is None:
        return None
    if text == "all":
        return list(range(world_size))
    found: list[int] = []
    problems = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,7})(?:-([0-9]{1,7}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not match or last < first:
            problems.append(f"{part!r} is no rank such as 3 and no run of them such as 0-7")
        elif last >= world_size:
            problems.append(f"there is no rank {last}: the plan has ranks 0 to {world_size - 1}")
        else:
            found += range(first, last + 1)
    _refuse("--ranks", problems, "write --ranks 0,8 or --ranks 0-7 or --ranks all")
    return list(dict.fromkeys(found))


def check_output(path: Path | None) -> None:
    """Refuse a file that cannot be written before the work, not after it."""
    if path is None:
        return
    folder = path.parent
    problem = (
        f"{path} is a folder"
        if path.is_dir()
        else f"there is no folder {folder}"
        if not folder.is_dir()
        else f"the folder {folder} is not writable"
        if not os.access(folder, os.W_OK)
        else None
    )
    if problem:
        raise UsageError(f"cannot write {path}", because=[problem])
