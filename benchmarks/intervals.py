"""Intervals of predictions, fitted on the residuals of measured runs, and how often they hold for a source left out.

    python -m benchmarks.intervals      benchmarks/residuals.csv ─► cost_models/spreads.py, tables of docs/10-….md

x = log(measured / predicted). Rows of one source (who measured, on what) err alike, so each source counts once, however
many rows it has. Kinds are few: of steps, the kind of plan and the origin of the rates; of memory, the kind of device.

    mean(k), var(k)     over the n sources of kind k: of their means; of their rows' mean squares around it · n / (n - 1)
    M, B                the whole: mean of the kinds' means, and the variance of these
    V                   geometric mean of the kinds' variances, as moderated t-statistics take it (Smyth 2004): with an
                        arithmetic one, one kind that is predicted badly would widen all others
    center(k)           (n · mean(k) + PRIOR · M) / (n + PRIOR)
    scale(k)²           (n · mean square around center(k) + PRIOR · (V + B)) / (n + PRIOR) · (1 + 1 / (n + kinds))
    freedom(k)          n + kinds - 1, 1 or more: the whole is known from so many kinds, and each own source adds one

A kind without rows is as the whole. Left-out coverage: fitted without a source, the share of its rows inside.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from benchmarks.residuals import Residual, read_residuals
from cost_models.intervals import KINDS, RATES, SHARE, Spread

PRIOR = 1.0
"""Sources that the whole counts as. The density of publishers left out is flat from 0.5 to 1 and lower on both sides
(``python -m benchmarks.intervals`` prints it)."""
TRIED = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Other values of PRIOR, of which the density is printed."""

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "cost_models/spreads.py"
PAGE = ROOT / "docs/10-calibration-and-prediction.md"
START, END = "<!-- intervals: made by python -m benchmarks.intervals -->", "<!-- end of intervals -->"

Key: TypeAlias = tuple[str, ...]
"""The name of a kind: (kind of plan, rates), or (kind of device,)."""
STEP_KEYS: tuple[Key, ...] = tuple((kind, rates) for kind in KINDS for rates in RATES)
MEMORY_KEYS: tuple[Key, ...] = (("cuda",), ("cpu",))


@dataclass(frozen=True)
class Error:
    """log(measured / predicted) of one run."""

    source: str
    kind: Key
    x: float


def step_errors(rows: Iterable[Residual]) -> list[Error]:
    """Return the errors of steps; rates that are guesses count nowhere."""
    return [
        Error(row.source, (row.kind, row.rates), math.log(row.step)) for row in rows if row.step and row.rates
    ]


def memory_errors(rows: Iterable[Residual]) -> list[Error]:
    """Return the errors of peaks."""
    return [Error(row.source, (row.device,), math.log(row.memory)) for row in rows if row.memory]


# --------------------------------------------------------------------------------------------------
# The fit


def fit(errors: Iterable[Error], kinds: Sequence[Key], prior: float = PRIOR) -> dict[Key, Spread]:
    """Fit a spread per kind, as the head of this file says. Some kind has two sources or more."""
    known: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for error in errors:
        known[error.kind][error.source].append(error.x)
    means = {kind: _source_mean(sources, lambda x: x) for kind, sources in known.items()}
    whole = statistics.fmean(means.values())
    between = statistics.fmean((mean - whole) ** 2 for mean in means.values())
    variances = [
        _square(sources, means[kind]) * len(sources) / (len(sources) - 1)
        for kind, sources in known.items()
        if len(sources) > 1
    ]
    within = statistics.geometric_mean(variances)
    spreads = {}
    for kind in kinds:
        sources = known.get(kind, {})
        n = len(sources)
        center = (n * means.get(kind, 0.0) + prior * whole) / (n + prior)
        own = n * _square(sources, center) if n else 0.0
        variance = (own + prior * (within + between)) / (n + prior) * (1 + 1 / (n + len(known)))
        freedom = max(1, n + len(known) - 1)
        spreads[kind] = Spread(center, math.sqrt(variance), freedom, sum(map(len, sources.values())), n)
    return spreads


def _source_mean(sources: Mapping[str, Sequence[float]], value: Callable[[float], float]) -> float:
    """Return the mean over sources of the mean over their rows."""
    return statistics.fmean(statistics.fmean(map(value, rows)) for rows in sources.values())


def _square(sources: Mapping[str, Sequence[float]], center: float) -> float:
    return _source_mean(sources, lambda x: (x - center) ** 2)


# --------------------------------------------------------------------------------------------------
# Left out


@dataclass(frozen=True)
class LeftOut:
    """Rows of one group under spreads that were fitted without it. ``density``: mean log density of its rows."""

    name: str
    rows: int
    inside: int
    density: float


def left_out(
    errors: Sequence[Error], name: Callable[[str], str] = str, share: float = SHARE, prior: float = PRIOR
) -> list[LeftOut]:
    """Leave out one group of sources after the other; ``name`` is a source's group."""
    found = []
    kinds = sorted({error.kind for error in errors})
    for group in sorted({name(error.source) for error in errors}):
        spreads = fit((error for error in errors if name(error.source) != group), kinds, prior)
        rows = [error for error in errors if name(error.source) == group]
        inside = 0
        for error in rows:
            low, high = spreads[error.kind].interval(1.0, share)
            inside += low <= math.exp(error.x) <= high
        density = statistics.fmean(log_density(spreads[error.kind], error.x) for error in rows)
        found.append(LeftOut(group, len(rows), inside, density))
    return found


def publisher(source: str) -> str:
    """Return who measured: "llm-foundry, a100_40gb" -> "llm-foundry"; models on local workers are one each."""
    return source.partition(",")[0]


def log_density(spread: Spread, x: float) -> float:
    """Return the log density of Student's t, shifted and scaled."""
    v, t = spread.freedom, (x - spread.center) / spread.scale
    constant = math.lgamma((v + 1) / 2) - math.lgamma(v / 2) - math.log(v * math.pi) / 2
    return constant - math.log(spread.scale) - (v + 1) / 2 * math.log1p(t * t / v)


# --------------------------------------------------------------------------------------------------
# Written


def table_text(rows: Sequence[Residual]) -> str:
    """Write cost_models/spreads.py."""
    steps, memory = fit(step_errors(rows), STEP_KEYS), fit(memory_errors(rows), MEMORY_KEYS)
    lines = [
        '"""Spreads of measured over predicted, by kind of plan and origin of the rates, and by kind of device.',
        "",
        "Made by python -m benchmarks.intervals from benchmarks/residuals.csv, not by hand; there are the formulas.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "from collections.abc import Mapping",
        "",
        "from cost_models.devices import CountedKind",
        "from cost_models.intervals import PlanKind, RateSource, Spread",
        "",
        "STEP_SECONDS: Mapping[tuple[PlanKind, RateSource], Spread] = {",
        *(f'    ("{kind}", "{rates}"): {_spread_text(steps[kind, rates])},' for kind, rates in STEP_KEYS),
        "}",
        "",
        "PEAK_BYTES: Mapping[CountedKind, Spread] = {",
        *(f'    "{device}": {_spread_text(memory[device,])},' for (device,) in MEMORY_KEYS),
        "}",
    ]
    return "\n".join(lines) + "\n"


def _spread_text(spread: Spread) -> str:
    numbers = f"center={spread.center:.4f}, scale={spread.scale:.4f}, freedom={spread.freedom:g}"
    return f"Spread({numbers}, runs={spread.runs}, sources={spread.sources})"


def page_text(rows: Sequence[Residual]) -> str:
    """Write the tables of the page."""
    steps, memory = fit(step_errors(rows), STEP_KEYS), fit(memory_errors(rows), MEMORY_KEYS)
    spreads = {f"step, {kind}, {rates}": spread for (kind, rates), spread in steps.items() if spread.runs}
    lines = [
        "| prediction | runs | sources | 90% of runs measure, of what is predicted |",
        "|---|---|---|---|",
    ]
    spreads["step, all other kinds"] = next(spread for spread in steps.values() if not spread.runs)
    spreads |= {f"peak, {device}": spread for (device,), spread in memory.items()}
    for name, spread in spreads.items():
        low, high = spread.interval(1.0)
        lines.append(
            f"| {name} | {spread.runs or 'none'} | {spread.sources or 'none'} | {low:.2f} to {high:.2f} |"
        )
    lines += ["", "| left out | steps inside | peaks inside |", "|---|---|---|"]
    found = {
        side: {group.name: group for group in left_out(errors)}
        for side, errors in (("step", step_errors(rows)), ("peak", memory_errors(rows)))
    }
    for name in sorted({name for groups in found.values() for name in groups}):
        cells = [_inside(groups.get(name)) for groups in found.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    for title, summary in (("all rows", _of_rows), ("mean of the sources", _of_groups)):
        lines.append(
            f"| {title} | {' | '.join(summary(list(groups.values())) for groups in found.values())} |"
        )
    publishers = [left_out(errors, publisher) for errors in (step_errors(rows), memory_errors(rows))]
    lines.append(
        f"| mean, whole publishers or models left out | {' | '.join(_of_groups(groups) for groups in publishers)} |"
    )
    return "\n".join(lines)


def _inside(group: LeftOut | None) -> str:
    return "" if group is None else f"{group.inside} of {group.rows}"


def _of_rows(groups: Sequence[LeftOut]) -> str:
    rows = sum(group.rows for group in groups)
    return f"{sum(group.inside for group in groups) / rows:.0%} of {rows}"


def _of_groups(groups: Sequence[LeftOut]) -> str:
    return f"{statistics.fmean(group.inside / group.rows for group in groups):.0%}"


def written_page(page: str, rows: Sequence[Residual]) -> str:
    """Return the page with its tables made anew."""
    before, _, rest = page.partition(START)
    return f"{before}{START}\n\n{page_text(rows)}\n\n{END}{rest.partition(END)[2]}"


def densities(rows: Sequence[Residual]) -> Iterator[str]:
    """Yield what PRIOR was chosen by: the log density of publishers left out, the mean row of each, summed."""
    for prior in TRIED:
        sums = [
            sum(group.density for group in left_out(errors, publisher, prior=prior))
            for errors in (step_errors(rows), memory_errors(rows))
        ]
        yield f"PRIOR {prior:4}: log density, left out: steps {sums[0]:6.2f}, peaks {sums[1]:6.2f}, both {sum(sums):6.2f}"


def main() -> None:
    """Fit, write the table and the page, print both."""
    rows = read_residuals()
    for path, text in ((TABLE, table_text(rows)), (PAGE, written_page(PAGE.read_text(), rows))):
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")
    print(page_text(rows))
    print("\n".join(densities(rows)))


if __name__ == "__main__":
    main()
