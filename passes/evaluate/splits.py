"""An evaluation graph in the same blocks of neurons as training, so that it reads the parts where they are.

    training     fc1 split 60/40       parts fc1.weight#0, fc1.weight#1
    evaluation   fc1: the same op      split 60/40 too, its blocks run where training's do
                 what evaluation does otherwise, or cannot split, reads parts put together (``passes.evaluate.parts``)

Ops are matched as placements are: by module path, kind and count (``passes.evaluate.placement``).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from cost_models.errors import UsageError
from passes.evaluate.parts import read_parts
from passes.evaluate.placement import keyed_ops
from passes.graph.graph import OpGraph
from passes.split.split import Split, split_neurons

log = logging.getLogger("partitioner")


def reuse_splits(evaluation: OpGraph, training: OpGraph, run: OpGraph, splits: Sequence[Split]) -> OpGraph:
    """``evaluation`` on the parts of ``run``, which is ``training`` after ``splits``."""
    if not run.parts:
        return evaluation
    key_of = {node.name: key for key, node in keyed_ops(training)}
    op_of = {key: node.name for key, node in keyed_ops(evaluation)}
    found = tuple(
        replace(s, op=op_of[key_of[s.op]]) for s in splits if s.op in key_of and key_of[s.op] in op_of
    )
    return read_parts(_split(evaluation, run, found), run.parts)


def _split(evaluation: OpGraph, run: OpGraph, splits: tuple[Split, ...]) -> OpGraph:
    """``evaluation`` after ``splits``, as it is where that makes other parts than those of ``run``."""
    try:
        made = split_neurons(evaluation, splits) if splits else evaluation
    except UsageError as error:
        log.info("evaluation is not split as training is: %s", "; ".join(error.because))
        return evaluation
    if any(run.parts.get(name) != part for name, part in made.parts.items()):
        log.info("evaluation is not split as training is: its parts would be others")
        return evaluation
    return made
