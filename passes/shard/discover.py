"""Choices of ops that no rule speaks about, found by trying: shard small inputs, run, put together, compare.

    discovery = Discovery()
    discovery.choices(node)     a rule's choices, else what was found, else all replicated
    discovery.counts            {"rule": 512, "discovered": 3, "replicated": 1}

What holds for several draws of values (ties, large and small numbers, NaN, infinities, repeated, sorted and negative
indices, as far as the op takes them), forward and backward, on axes of 2 and 4 and on two axes, is a choice. An op that
draws random numbers, writes to its operands, gives other results when run again, or fails on all small inputs stays whole.
Results are kept per op and signature with what they were proved on, in memory and as JSON beside the calibration; what is
read back is tried again on a fresh draw, since the code behind a custom op's name may have changed.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, fx

from cost_models.files import CALIBRATION, calibration_path, replace_file
from cost_models.layout import Partial
from passes.graph.nodes import op_name, tensors_of
from passes.graph.recomputed import draws_random_numbers
from passes.shard.rules import choices as choices_by_rule
from passes.shard.rules import has_rule, makes_tensors
from passes.shard.rules.enumerate import AXIS, choices_that_hold
from passes.shard.rules.local import fits
from passes.shard.rules.producers import replicated
from passes.shard.rules.samples import HARD_MANNERS, MANNERS, Manner, Sample, samples, signature
from passes.shard.rules.simulate import Trial, difference, is_float, node_of, problem, trial
from passes.shard.words import Choice, choice_text, read_choice
from runtime.ops.opaque import Opaque, no_compile

logger = logging.getLogger("partitioner")

SECONDS = 5.0
"""The longest that trying all placements of one op may take of a processor (typically 0.1): what is not tried by then is no
choice."""
AXES = (AXIS, 4)
PAIR = (AXIS, AXIS)
"""The mesh on which every two choices have to go together."""
SEED = 20_260_101
DOUBLE_TOLERANCE = 1e-10
TOLERANCES: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
"""Differences allowed in ops that do not take float64, relative to the largest number."""
LAPACK = ("linalg_", "cholesky", "geqrf", "lu_", "ormqr", "triangular_solve")
"""Beginnings of the names of ops that call LAPACK, which is given numbers only: it writes of others to the terminal."""
FORMAT = 4
"""The version of the file that keeps results between runs. Version 1 knew neither hard values nor pairs of axes, version 2
took choices for proved where no draw used an operand, version 3 never ran code that asks for gradients itself."""
PROVED_ON = [*(f"{m.floats} {m.integers}" for m in (*MANNERS, *HARD_MANNERS)), *map(str, (*AXES, PAIR))]
"""The values and meshes that kept choices were proved on, in words: others are not read."""


@dataclass(frozen=True)
class FoundChoices:
    """The choices of one op, and where they come from."""

    choices: tuple[Choice, ...]
    how: Literal["rule", "discovered", "replicated"]


class Discovery:
    """Choices of a graph's ops. Remembers what it found; ``path``: the file that keeps it between runs; None: no file."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._kept: dict[str, list[Choice]] = read_kept(path) if path is not None else {}
        self._known: dict[str, tuple[Choice, ...]] = {}
        self._seen: dict[tuple[str, str], str] = {}
        self.seconds = 0.0
        """Spent on trying."""

    @classmethod
    def stored(cls) -> Discovery:
        """Return one that reads and writes the user's cache."""
        return cls(kept_file())

    def choices(self, node: fx.Node) -> tuple[Choice, ...]:
        """List the choices of any op, all replicated first."""
        return self.find(node).choices

    def only_whole(self, node: fx.Node) -> bool:
        """Tell whether every rank doing everything is the only way known of an op; no word on what counts or compares."""
        return len(self.choices(node)) == 1 and tensors_of(node)[0].is_floating_point()

    def find(self, node: fx.Node) -> FoundChoices:
        """Find the choices of an op, and where they come from."""
        if has_rule(node):
            found = FoundChoices(choices_by_rule(node), "rule")
        else:
            tried = self._discovered(node)
            found = FoundChoices(tried, "discovered" if len(tried) > 1 else "replicated")
        self._seen[node.name, str(node.target)] = found.how
        return found

    def allows(self, node: fx.Node, given: Sequence[Choice]) -> bool:
        """Tell whether an op may run so. What another process found is tried here if this one did not get to it."""
        missing = set(given) - set(self.choices(node))
        return not missing or (not has_rule(node) and tried_again(node, [*missing]) is not None)

    @property
    def counts(self) -> Mapping[str, int]:
        """Ops asked about, by where their choices come from."""
        return {"rule": 0, "discovered": 0, "replicated": 0, **Counter(self._seen.values())}

    def _discovered(self, node: fx.Node) -> tuple[Choice, ...]:
        key = signature(node)
        if key not in self._known:
            started = time.monotonic()
            kept = self._kept.get(key)
            found = tried_again(node, kept) if kept is not None else None
            if found is None:
                found = all_valid_choices(node)
                if self._path is not None:
                    keep(self._path, key, found)
            self._known[key] = found
            self.seconds += time.monotonic() - started
            logger.info("sharding of %s: %s", node.target, ", ".join(map(str, found)))
        return self._known[key]


def all_valid_choices(node: fx.Node, seconds: float = SECONDS) -> tuple[Choice, ...]:
    """Find every choice that holds numerically, without rules; for any op. All replicated first.

    Choices with local functions of their own (``Choice.local``) are not among them.
    """
    whole = replicated(node)
    with _quietly():
        trials = _trials(node)
        if len(trials) < 2 or _vague(trials[1]) or not _all_used(trials):
            return whole
        found = choices_that_hold(trials[0], seconds)
        proved = [choice for choice in found if choice not in whole and _proved(trials, choice)]
        return (*whole, *_together(trials, proved, time.thread_time() + seconds))


def tried_again(node: fx.Node, choices: Sequence[Choice]) -> tuple[Choice, ...] | None:
    """Return the choices if all of them hold on a fresh draw, else None."""
    with _quietly():
        trials = _trials(node)
        whole = replicated(node)
        sound = not trials or _all_used(trials)
        sound &= all(len(c.inputs) == len(whole[0].inputs) and _proved(trials, c) for c in choices)
    return (*whole, *(c for c in choices if c not in whole)) if sound and (trials or not choices) else None


def _proved(trials: Sequence[Trial], choice: Choice) -> bool:
    return all(_holds(tried, [choice], [ranks]) for tried in trials for ranks in AXES)


def _all_used(trials: Sequence[Trial]) -> bool:
    """Tell whether each operand makes a difference in some trial.

    One that makes none (a table of rare words, say, that no small index looks up) may be in parts, or whole, with gradients
    that are summed or not: everything holds, and nothing is proved.
    """
    return all(
        any(_is_used(index, tried, other) for tried, other in itertools.pairwise(trials))
        for index in range(len(trials[0].values))
    )


def _is_used(index: int, tried: Trial, other: Trial) -> bool:
    """Tell whether the operand has a gradient, or other results with the values of another trial."""
    gradient = tried.gradients[index]
    if gradient is not None and bool(gradient.any()):
        return True
    values = [*tried.values[:index], other.values[index], *tried.values[index + 1 :]]
    floats = [i for i, value in enumerate(values) if is_float(value)]
    try:
        changed = trial(tried.node, values, tried.tolerance, frozen=floats)
    except Exception:  # noqa: BLE001 an unknown op may raise anything: it looked at them
        return True
    pairs = zip(tried.outputs, changed.outputs, strict=True)
    return any(difference(before, after, tried.tolerance) is not None for before, after in pairs)


def _together(trials: Sequence[Trial], choices: Sequence[Choice], ends: float) -> list[Choice]:
    """Keep the choices that go with each other on two axes, the first ones first; what is not tried in time goes."""
    kept: list[Choice] = []
    few = [*trials[:2], trials[-1]]
    for choice in choices:
        pairs = [(choice, choice), *((other, choice) for other in kept), *((choice, other) for other in kept)]
        if time.thread_time() < ends and all(_holds(tried, pair, PAIR) for pair in pairs for tried in few):
            kept.append(choice)
    return kept


def _holds(tried: Trial, choices: Sequence[Choice], mesh: Sequence[int]) -> bool:
    """Tell whether choices hold on a trial; those that do not fit its sizes say nothing against them."""
    if not fits(tried.node, choices, mesh):
        return True
    partial = any(isinstance(need.placement, Partial) for choice in choices for need in choice.inputs)
    if partial and any(bool(value.isinf().any()) for value in tried.values if is_float(value)):
        return True  # an infinite number is no sum of other parts
    try:
        wrong = problem(tried, choices, mesh)
    except Exception as error:  # noqa: BLE001 an unknown op may raise anything
        wrong = str(error)
    if wrong is not None:
        logger.debug("%s is no choice of %s: %s", choices, tried.node.target, wrong)
    return wrong is None


def _trials(node: fx.Node) -> list[Trial]:
    """Draw small inputs that the op takes; none if it takes none, or is not a function of its operands."""
    target = node.target
    if not makes_tensors(node) or draws_random_numbers(node):
        return []
    if isinstance(target, Opaque):
        if target.written:
            return []
    elif not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return []
    for sample in samples(node):
        for double in (True, False):
            for high in (_least_size(sample), 2, 1):
                try:
                    found = [_trial(sample, manner, high, double) for manner in MANNERS]
                except Exception as error:  # noqa: BLE001 an unknown op may raise anything
                    logger.debug("%s does not take small inputs: %s", target, error)
                    continue
                if not all(sample.alike(t.outputs) for t in found):
                    break
                if not all(map(_is_function, found)):
                    return []
                return sorted([*found, *_hard_trials(sample, high, double)], key=_vague)
    return []


def _hard_trials(sample: Sample, high: int, double: bool) -> Iterator[Trial]:
    """Draw values that an op may refuse, and yield trials of those that it takes."""
    for manner in HARD_MANNERS:
        if manner.floats in ("nan", "infinite") and op_name(sample.node).startswith(LAPACK):
            continue
        try:
            tried = _trial(sample, manner, high, double)
            taken = sample.alike(tried.outputs) and _is_function(tried)
        except Exception as error:  # noqa: BLE001 an unknown op may raise anything
            logger.debug("%s does not take %s: %s", sample.node.target, manner, error)
            continue
        if taken:
            yield tried


def _least_size(sample: Sample) -> int:
    """Return the least size: indices below it are good for any dimension."""
    return max(1, min((size for shape in sample.shapes for size in shape if size > 1), default=1))


def _trial(sample: Sample, manner: Manner, high: int, double: bool) -> Trial:
    args, kwargs, values = sample.draw(manner, high, double)
    node = node_of(sample.node.target, *args, **kwargs)
    floats = [value.dtype for value in values if is_float(value)]
    tolerance = DOUBLE_TOLERANCE if double else max((TOLERANCES.get(d, 1e-10) for d in floats), default=1e-10)
    if manner.floats == "infinite":  # gradients: parts of a sum times infinity are not the sum times infinity
        return trial(node, values, tolerance, frozen=[i for i, value in enumerate(values) if is_float(value)])
    return _differentiable_trial(node, values, tolerance)


def _differentiable_trial(node: fx.Node, values: Sequence[Tensor], tolerance: float) -> Trial:
    """Run the op with gradients of as many operands as it can be differentiated by: all, all but one or two, or none."""
    floats = [i for i, value in enumerate(values) if is_float(value)]
    reason: Exception | None = None
    for frozen in ([], *([i] for i in floats), *([i, j] for i in floats for j in floats if i < j), floats):
        try:
            return trial(node, values, tolerance, frozen)
        except Exception as error:  # noqa: BLE001 an unknown op may raise anything
            reason = error
    raise reason if reason is not None else ValueError("no way to run it")


def _is_function(tried: Trial) -> bool:
    """Tell whether the op gives the same again and leaves what it differentiates as it was."""
    again = trial(
        tried.node, tried.values, tried.tolerance, [i for i, g in enumerate(tried.gradients) if g is None]
    )
    same = all(
        difference(a, b, tried.tolerance) is None for a, b in zip(again.outputs, tried.outputs, strict=True)
    )
    # ATen's only silent writers are norms with running statistics, which are placed like their other operands.
    kept = isinstance(tried.node.target, torch._ops.OpOverload) and tried.node.target.namespace == "aten"
    kept = kept or all(
        difference(after, value, tried.tolerance) is None
        for after, value in zip(tried.after, tried.values, strict=True)
    )
    return same and kept


def _vague(tried: Trial) -> bool:
    """Tell whether results say little: what is not finite, or nothing but zeros, agrees with too much to begin with."""
    return not all(bool(y.isfinite().all()) and bool(y.any()) for y in tried.outputs)


@contextmanager
def _quietly() -> Iterator[None]:
    """Draw the same every time and leave the user's generator alone; autograd on, whatever the caller set.

    One thread: for small inputs several are slower, by 40 times on a busy machine.
    """
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), no_compile():
        torch.manual_seed(SEED)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def kept_file() -> Path | None:
    """Return where results are kept between runs: beside the calibration; None where that is switched off."""
    return None if os.environ.get(CALIBRATION) == "none" else calibration_path().with_name("sharding.json")


def read_kept(path: Path) -> dict[str, list[Choice]]:
    """Read kept choices, by signature. Empty if there is no file, or a bad one, or one of another torch or format."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if (data["format"], data["torch"]) != (FORMAT, torch.__version__) or data["proved_on"] != PROVED_ON:
            return {}
        return {str(key): [read_choice(text) for text in texts] for key, texts in data["choices"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        logger.warning("ignoring the shardings in %s: %s", path, error)
        return {}


def keep(path: Path, key: str, choices: Sequence[Choice]) -> None:
    """Add one op's choices to the file. If it cannot be written, the next run takes longer, nothing else."""
    known = {**read_kept(path), key: list(choices)}
    data: dict[str, Any] = {
        "format": FORMAT,
        "torch": torch.__version__,
        "proved_on": PROVED_ON,
        "choices": {name: [choice_text(choice) for choice in found] for name, found in known.items()},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, json.dumps(data, indent=1))
    except OSError as error:
        logger.warning("cannot keep the shardings in %s: %s", path, error)
