"""Pins: ``{glob: stage}`` over module paths or op names, resolved to ops, every conflict reported at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from cost_models.errors import UsageError

MAX_REPORTED = 8


def resolve_pins(
    pins: Mapping[str, int],
    names: Sequence[str],
    module_paths: Sequence[str],
    readers: Sequence[Sequence[int]],
    together: Sequence[Sequence[int]] = (),
    place: str = "stage",
) -> dict[int, int]:
    """Op index -> stage, or the rank that ops are pinned to where ``place`` says so.

    A glob matches an op by its name, its module path or that of any enclosing module.

    Raises ``UsageError`` naming both globs where two disagree about an op, about ops that must stay
    together, or about the order of ops; and for a glob that matches nothing.
    """
    problems: list[str] = []
    by: dict[int, str] = {}
    unmatched: list[str] = []
    for glob, stage in pins.items():
        if stage < 0:
            problems.append(f"{glob!r} is pinned to {place} {stage}; {place}s start at 0")
            continue
        matched = [op for op in range(len(names)) if matches(glob, names[op], module_paths[op])]
        if not matched:
            unmatched.append(glob)
        for op in matched:
            other = by.setdefault(op, glob)
            if pins[other] != stage:
                problems.append(
                    f"{names[op]} matches {other!r} ({place} {pins[other]}) and {glob!r} ({place} {stage})"
                )
    problems += _split_groups(pins, by, names, together, place)
    problems += _wrong_order(pins, by, names, readers)
    problems += [f"{glob!r} matches no module path and no op" for glob in unmatched]
    if problems:
        unique = list(dict.fromkeys(problems))
        more = [f"… and {len(unique) - MAX_REPORTED} more"] if len(unique) > MAX_REPORTED else []
        raise UsageError(
            "cannot use these pins",
            [*unique[:MAX_REPORTED], *more],
            _suggestions(unmatched, module_paths, place),
        )
    return {op: pins[glob] for op, glob in by.items()}


def matches(glob: str, name: str, module_path: str) -> bool:
    """Tell whether a glob means an op: by its name, its module path or that of an enclosing module."""
    if fnmatchcase(name, glob):
        return True
    parts = module_path.split(".") if module_path else []
    return any(fnmatchcase(".".join(parts[:end]), glob) for end in range(1, len(parts) + 1))


def _split_groups(
    pins: Mapping[str, int],
    by: Mapping[int, str],
    names: Sequence[str],
    together: Sequence[Sequence[int]],
    place: str,
) -> list[str]:
    problems = []
    for group in together:
        pinned = [op for op in group if op in by]
        for op in pinned[1:]:
            a, b = by[pinned[0]], by[op]
            if pins[a] != pins[b]:
                problems.append(
                    f"{names[pinned[0]]} ({a!r}, {place} {pins[a]}) and {names[op]} ({b!r}, {place} {pins[b]}) "
                    f"share a buffer or a tuple, or lie between ops that do, and must be in one {place}"
                )
    return problems


def _wrong_order(
    pins: Mapping[str, int], by: Mapping[int, str], names: Sequence[str], readers: Sequence[Sequence[int]]
) -> list[str]:
    """Ops that read, directly or not, from an op that is pinned to a later stage."""
    problems: dict[tuple[str, str], str] = {}
    latest: dict[int, int] = {}  # op -> the pinned op with the latest stage among it and its producers
    for op in range(len(names)):
        source = latest.get(op)
        if op in by:
            if source is not None and pins[by[source]] > pins[by[op]]:
                problems.setdefault(
                    (by[source], by[op]),
                    f"{names[op]} ({by[op]!r}, stage {pins[by[op]]}) reads from {names[source]} "
                    f"({by[source]!r}, stage {pins[by[source]]}), which would be later",
                )
            elif source is None or pins[by[op]] > pins[by[source]]:
                source = op
        if source is None:
            continue
        for reader in readers[op]:
            other = latest.get(reader)
            if other is None or pins[by[other]] < pins[by[source]]:
                latest[reader] = source
    return list(problems.values())


def _suggestions(unmatched: Sequence[str], module_paths: Sequence[str], place: str) -> list[str]:
    paths = sorted({path for path in module_paths if path})
    hints = []
    for glob in unmatched:
        close = get_close_matches(glob.rstrip("*."), paths, n=3, cutoff=0.4) or paths[:3]
        if close:
            hints.append(f"for {glob!r}: {', '.join(close)}")
    order = ", in the order in which data flows" if place == "stage" else ""
    return [*hints, f"give each module to one {place}{order}"]
