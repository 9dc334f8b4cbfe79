"""One placement for two traces: the evaluation graph runs where the training graph was placed.

Training mode is baked into a trace, so evaluation is a second one. Its ops are matched with the training ops by module
path, kind of op and count, and whatever is left follows its inputs:

    training                                stage        evaluation                          stage
    fc1        linear   module "fc1"          0          linear    module "fc1"                0   (same)
    drop       dropout  module "drop"         0          -
    fc2        linear   module "fc2"          1          linear    module "fc2"                1   (same)
                                                         softmax   module ""                   1   (follows its input)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import fx

from cost_models.errors import ModelError
from passes.graph import OpGraph

_Key = tuple[str, str, int]


def reuse_placement(
    training: OpGraph, stage_of: Mapping[str, int], evaluation: OpGraph, recomputed: frozenset[str]
) -> dict[str, int]:
    """Stage of every op of ``evaluation`` that is not in ``recomputed`` (``passes.cheap`` of the evaluation graph).

    Every edge leads to the same or a later stage, and an op that reads a parameter runs where training holds it.
    Raises ModelError, with all conflicts, when the two graphs use a parameter in an order that no placement serves.
    """
    known = {key: stage_of[node.name] for key, node in _keyed(training) if node.name in stage_of}
    holders = _holders(training, stage_of)
    placed: dict[str, int] = {}
    conflicts: list[str] = []
    for key, node in _keyed(evaluation):
        if node.name in recomputed:
            continue
        earliest = max(
            (placed[source.name] for source in node.all_input_nodes if source.name in placed), default=0
        )
        owners = [holders[name] for name in _parameters(evaluation, node) if name in holders]
        stage = max(earliest, known.get(key, earliest))
        allowed = frozenset.intersection(*owners) if owners else None
        if allowed is not None and stage not in allowed:
            later = [owner for owner in allowed if owner >= earliest]
            if not later:
                where = node.meta.get("module_path") or "the model"
                conflicts.append(
                    f"{node.name} in {where} needs stage {sorted(allowed)} but reads from stage {earliest}"
                )
                continue
            stage = min(later)
        placed[node.name] = stage
    if conflicts:
        raise ModelError(
            f"cannot evaluate {evaluation.model_name} where it was placed for training",
            because=conflicts[:10],
            suggestions=["call the modules in the same order in training and in evaluation mode"],
        )
    return placed


def _keyed(graph: OpGraph) -> list[tuple[_Key, fx.Node]]:
    """Each op with (module path, op, how many of these came before)."""
    counts: dict[tuple[str, str], int] = defaultdict(int)
    keyed = []
    for node in graph.ops:
        kind = (str(node.meta.get("module_path", "")), str(node.target))
        keyed.append(((*kind, counts[kind]), node))
        counts[kind] += 1
    return keyed


def _parameters(graph: OpGraph, node: fx.Node) -> list[str]:
    inputs = (graph.input_of.get(source.name) for source in node.all_input_nodes)
    return [i.name for i in inputs if i is not None and i.kind in ("parameter", "buffer")]


def _holders(graph: OpGraph, stage_of: Mapping[str, int]) -> dict[str, frozenset[int]]:
    """The stages that hold each parameter or buffer."""
    holders: dict[str, set[int]] = defaultdict(set)
    for node in graph.ops:
        if node.name in stage_of:
            for name in _parameters(graph, node):
                holders[name].add(stage_of[node.name])
    return {name: frozenset(stages) for name, stages in holders.items()}
