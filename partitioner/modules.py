"""Stages in the user's words: which of the model's modules lie in which stage.

ops of stage 0: embed, layers.0.*, layers.1.*, part of layers.2   ->   ("embed", "layers.0-1", "layers.2 (part)")
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence


def modules_of_stages(
    module_path_of: Mapping[str, str], stage_of: Mapping[str, int], stages: int
) -> list[tuple[str, ...]]:
    """Outermost module paths that lie wholly inside each stage; a split leaf module is marked "(part)".

    ``module_path_of``: op name -> innermost module path, "" at the root. Order of first use is kept.
    """
    stages_of: dict[str, set[int]] = defaultdict(set)
    for op, stage in stage_of.items():
        for prefix in _prefixes(module_path_of.get(op, "")):
            stages_of[prefix].add(stage)
    found: list[dict[str, None]] = [{} for _ in range(stages)]
    for op, stage in stage_of.items():
        path = module_path_of.get(op, "")
        whole = next((prefix for prefix in _prefixes(path) if stages_of[prefix] == {stage}), None)
        if whole is not None:
            found[stage].setdefault(whole)
        elif path:
            found[stage].setdefault(f"{path} (part)")
    return [tuple(compress(names)) for names in found]


def compress(names: Iterable[str]) -> list[str]:
    """Runs of numbered siblings in one word: layers.0, layers.1, layers.2 -> layers.0-2."""
    result: list[tuple[str, int, int] | str] = []
    for name in names:
        match = re.fullmatch(r"(.*\.)(\d+)", name)
        last = result[-1] if result else None
        if match is None:
            result.append(name)
        elif isinstance(last, tuple) and last[0] == match[1] and last[2] + 1 == int(match[2]):
            result[-1] = (last[0], last[1], int(match[2]))
        else:
            result.append((match[1], int(match[2]), int(match[2])))
    return [
        r if isinstance(r, str) else f"{r[0]}{r[1]}" + (f"-{r[2]}" if r[2] > r[1] else "") for r in result
    ]


def shorten(names: Sequence[str], width: int) -> str:
    """As many names as fit into ``width`` characters; the rest as a count."""
    text = ""
    for position, name in enumerate(names):
        longer = f"{text}, {name}" if text else name
        rest = len(names) - position - 1
        if len(longer) + (len(f" +{rest} more") if rest else 0) > width and text:
            return f"{text} +{rest + 1} more"
        text = longer
    return text


def _prefixes(path: str) -> list[str]:
    """Outermost first: "a.b.c" -> ["a", "a.b", "a.b.c"]; nothing for the root."""
    parts = path.split(".") if path else []
    return [".".join(parts[: length + 1]) for length in range(len(parts))]
