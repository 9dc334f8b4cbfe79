"""Train every odd model in every way on real processes, and compare with the plain loop.

    python -m tests.odd_models.run [--only PART|…] [--slice k/n] [--ways layer2,…] [--seconds 600] [--json FILE]

Outcomes: equal; refused with a line or name of the user's; refused without; wrong; traceback; timeout; no plain loop.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cost_models.errors import PartitionerError
from partitioner import Plan, Workload, trace
from passes.graph.graph import OpGraph
from runtime.ranks.launch import WorkerPool
from tests.odd_models.case import Case
from tests.odd_models.plain_loop import (
    LEARNING_RATE,
    MOMENTUM,
    STEPS,
    Trained,
    batch_of,
    made,
    seed_all,
    train,
)
from tests.odd_models.table import CASES
from tests.odd_models.ways import WAYS, Way

CLASSES = (
    "equal",
    "refused, line",
    "refused, name",
    "refused, unclear",
    "WRONG",
    "TRACEBACK",
    "TIMEOUT",
    "no plain loop",
)
SECONDS = 60.0
"""The longest that one training may take; ranks wait for each other a quarter of it."""
SMALL = 1e-12
"""Absolute difference allowed beside the relative one, as a share of the largest number."""


@dataclass(frozen=True)
class Result:
    """What became of one model in one way."""

    case: str
    way: str
    outcome: str
    text: str = ""
    seconds: float = 0.0


def workload_of_case(case: Case) -> Workload:
    """Make the model, its first batch and its loss: a user's workload."""
    ready = made(case)
    return Workload(ready.model, batch_of(ready, 0), ready.loss, "odd")


def trace_of(case: Case) -> OpGraph:
    """Trace a case's model."""
    workload = workload_of_case(case)
    seed_all(7)
    return trace(
        workload.model, workload.example_inputs, loss_fn=workload.loss_fn, batch_dims=case.batch_dims
    )


def run_case(name: str, ways: Sequence[str], pool: WorkerPool, seconds: float = SECONDS) -> Iterator[Result]:
    """Train one case in several ways; traced and trained plainly once."""
    case = CASES[name]
    try:
        plain: dict[tuple[int, str], Trained] = {}
        for count in {WAYS[way].microbatches for way in ways}:
            plain[count, "mean"] = train(case, count)
            plain[count, "sum"] = train(case, count, mean=False)
            plain[count, "token_mean"] = train(case, 1)
    except Exception as error:  # noqa: BLE001 the user's own fault, whatever it is
        yield from (Result(name, way, "no plain loop", f"{type(error).__name__}: {error}") for way in ways)
        return
    graph, failure = None, None
    try:
        graph = trace_of(case)
    except Exception as error:  # noqa: BLE001 what is raised is the result
        failure = error
    for way in ways:
        started = time.monotonic()
        if graph is None:
            assert failure is not None
            yield Result(name, way, *_of_error(failure, case))
            continue
        outcome, text = _trained(name, WAYS[way], graph, plain, pool, seconds)
        yield Result(name, way, outcome, text, round(time.monotonic() - started, 2))


def _trained(
    name: str,
    way: Way,
    graph: OpGraph,
    plain: dict[tuple[int, str], Trained],
    pool: WorkerPool,
    seconds: float,
) -> tuple[str, str]:
    case = CASES[name]
    try:
        plan = way.plan(graph, case.samples)
    except Exception as error:  # noqa: BLE001 what is raised is the result
        return _of_error(error, case)
    answers = pool.run_each(
        train_rank,
        name,
        plan.model_dump_json(),
        seconds / 4,
        world_size=plan.world_size,
        timeout_seconds=seconds,
    )
    if not all(ok for ok, _ in answers):
        texts = [text for ok, text in answers if not ok]
        own = [text for text in texts if "Traceback (most recent call last)" in text]
        if any("no result in time" in text for text in texts) and not own:
            return "TIMEOUT", _short(texts[0])
        return ("TRACEBACK", _short(own[0])) if own else _of_text(texts[0], case)
    wanted = plain[way.microbatches, graph.loss_reduction]
    wrong = differences(wanted, [Trained(*answer) for _, answer in answers], case)
    return ("WRONG", wrong) if wrong else ("equal", "")


_graphs: dict[str, OpGraph] = {}


def train_rank(name: str, plan_json: str, timeout_seconds: float) -> tuple[list[float], dict[str, Tensor]]:
    """In a worker: three steps with momentum through the public face; losses, and rank 0's whole state."""
    warnings.simplefilter("ignore")
    logging.getLogger("partitioner").setLevel(logging.ERROR)
    case = CASES[name]
    ready = made(case)
    if name not in _graphs:
        _graphs.clear()
        _graphs[name] = trace_of(case)
    workload = Workload(ready.model, batch_of(ready, 0), ready.loss, "odd")
    losses = []
    with Plan.from_json(plan_json).deploy(
        workload,
        batch_dims=case.batch_dims,
        graph=_graphs[name],
        optimizer=torch.optim.SGD,
        optimizer_kwargs={"lr": LEARNING_RATE, "momentum": MOMENTUM},
        timeout_seconds=timeout_seconds,
    ) as engine:
        for step in range(STEPS):
            losses.append(float(engine.train_step(batch_of(ready, step))))
        state = {
            key: value.clone() for key, value in engine.state_dict().items() if isinstance(value, Tensor)
        }
    return losses, state


def differences(wanted: Trained, found: Sequence[Trained], case: Case) -> str:
    """Say what differs from the plain loop first; "" if nothing does."""
    for rank, one in enumerate(found):
        for step, (a, b) in enumerate(zip(one.losses, wanted.losses, strict=True)):
            if not _same(torch.tensor(a), torch.tensor(b), case.tolerance):
                return f"loss of step {step} on rank {rank}: {a!r}, plainly {b!r}"
    state = found[0].state
    if state.keys() != wanted.state.keys():
        missing, beyond = wanted.state.keys() - state.keys(), state.keys() - wanted.state.keys()
        return f"state: missing {sorted(missing)}, beyond {sorted(beyond)}"
    for key, tensor in wanted.state.items():
        if not _same(state[key], tensor, case.tolerance):
            return f"{key} differs by {_distance(state[key], tensor):.1e}"
    return ""


def _same(found: Tensor, wanted: Tensor, tolerance: float) -> bool:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return torch.equal(found, wanted)
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    found, wanted = found.to(wide), wanted.to(wide)
    finite = wanted[wanted.isfinite()].abs()
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(
        found, wanted, rtol=tolerance, atol=max(SMALL, tolerance * 1e-1) * max(scale, 1.0), equal_nan=True
    )


def _distance(found: Tensor, wanted: Tensor) -> float:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return math.inf
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    return float((found.to(wide) - wanted.to(wide)).abs().max()) if wanted.numel() else 0.0


def _of_error(error: Exception, case: Case) -> tuple[str, str]:
    if isinstance(error, PartitionerError):
        return _of_text(str(error), case)
    return "TRACEBACK", _short("".join(traceback.format_exception(error)))


def _of_text(text: str, case: Case) -> tuple[str, str]:
    if "error[internal]" in text:
        return "TRACEBACK", text
    if any(re.search(rf"\b{re.escape(file.name)}:\d+", text) for file in Path(__file__).parent.glob("*.py")):
        return "refused, line", text
    if any(re.search(rf"(?<![\w.]){re.escape(name)}(?![\w.])", text) for name in _names(case)):
        return "refused, name", text
    return "refused, unclear", text


def _names(case: Case) -> set[str]:
    """Collect what a refusal may call by name: state by its dotted path, a module or leaf in quotes or by its kind."""
    model = made(case).model
    paths = {name for name, _ in (*model.named_modules(), *model.named_parameters(), *model.named_buffers())}
    short = {*(path for path in paths if path), *(case.batch_dims or {})}
    kinds = ("module", "parameter", "buffer", "leaf")
    return {path for path in paths if "." in path} | {
        text for name in short for text in (f"'{name}'", *(f"{kind} {name}" for kind in kinds))
    }


def _short(text: str) -> str:
    lines = [line for line in text.strip().splitlines() if line.strip()]
    return "\n".join(lines[-7:])


def table(results: Sequence[Result]) -> str:
    """Write the counts of outcomes by way, then every model that is not equal."""
    ways = list(dict.fromkeys(r.way for r in results))
    counts = Counter((r.outcome, r.way) for r in results)
    lines = [f"{'':18}" + "".join(f"{way:>12}" for way in ways) + f"{'all':>8}"]
    for outcome in CLASSES:
        row = [counts[outcome, way] for way in ways]
        lines.append(f"{outcome:18}" + "".join(f"{n:12}" for n in row) + f"{sum(row):8}")
    others: dict[tuple[str, str, str], list[str]] = {}
    for r in results:
        if r.outcome != "equal":
            others.setdefault((r.outcome, r.case, r.text), []).append(r.way)
    for (outcome, name, text), where in sorted(others.items(), key=lambda item: CLASSES.index(item[0][0])):
        lines += [
            "",
            f"{outcome} | {name} | {', '.join(where)}",
            *(f"    {line}" for line in text.splitlines()[:9]),
        ]
    return "\n".join(lines)


def chosen(only: str, part: str) -> list[str]:
    """List the cases whose name has one of the texts, and of these every n-th from the k-th."""
    names = [n for n in CASES if not only or any(text in n for text in only.split("|"))]
    if part:
        k, n = map(int, part.split("/"))
        names = names[k - 1 :: n]
    return names


def run(
    names: Sequence[str],
    ways: Sequence[str],
    pool: WorkerPool,
    progress: Path | None = None,
    seconds: float = SECONDS,
) -> list[Result]:
    """Run cases one after another."""
    results: list[Result] = []
    for index, name in enumerate(names):
        found = list(run_case(name, ways, pool, seconds))
        results += found
        if progress is not None:
            progress.write_text(json.dumps([asdict(r) for r in results], indent=1))
            others = [f"{r.way} {r.outcome}" for r in found if r.outcome != "equal"]
            print(  # noqa: T201
                f"{index + 1}/{len(names)} {name}: {', '.join(others) or 'equal'}",
                file=sys.stderr,
                flush=True,
            )
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="texts of names, separated by |")
    parser.add_argument("--slice", default="", help="k/n: every n-th case from the k-th")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="the longest that one training may take"
    )
    parser.add_argument("--json", type=Path)
    given: Any = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("partitioner").setLevel(logging.ERROR)
    ways = given.ways.split(",")
    ranks = max(WAYS[way].ranks for way in ways)
    with WorkerPool(ranks, group_timeout_seconds=given.seconds / 3) as pool:
        results = run(chosen(given.only, given.slice), ways, pool, given.json, given.seconds)
    print(table(results))  # noqa: T201
    return int(any(r.outcome in ("WRONG", "TRACEBACK", "TIMEOUT") for r in results))


if __name__ == "__main__":
    sys.exit(main())
