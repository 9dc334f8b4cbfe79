"""The words of each strategy: its name, what it may be told, what it leaves out. Data only, cheap to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

StrategyName = Literal["layer", "feature", "hybrid", "free"]
RecomputeMode: TypeAlias = Literal["none", "gathers", "selective", "full", "auto"]
"""The blocks whose activations backward computes again: none, all of them, or where memory asks for it. ``gathers``: none,
but what is gathered for a product with a parameter alone is gathered again for its backward, and not kept (FSDP's full
shard; of sequence parallelism the product's input, too). ``selective``: attentions alone, which are not one fused op."""


def of_activations(mode: RecomputeMode) -> RecomputeMode:
    """Return the mode for a search that recomputes blocks only: what is less than a block counts as ``none`` there."""
    return "none" if within_blocks(mode) else mode


def within_blocks(mode: RecomputeMode) -> str:
    """Return the mode if it computes less than whole blocks again, else ""."""
    return mode if mode in ("gathers", "selective") else ""


WITHIN: Mapping[str, str] = {
    "": "",
    "gathers": ", parameters gathered again in backward",
    "selective": ", attentions computed again in backward",
}
"""The words for less than whole blocks that run again, in the space of a certificate."""

BY_HAND = "fixed by hand"
"""The status in files of plans with something fixed that were made before such requests had a bound."""

FIXED = "fixed: "
"""Begins the space of a certificate about what a user left open of a pipeline."""


@dataclass(frozen=True)
class StrategyWords:
    """A strategy, as people and options speak of it."""

    adverb: str
    """The strategy in a sentence: planned layer-wise."""
    pinned_to: str
    """The place that a pin names: stage, layout or device."""
    options: frozenset[str]
    """Options of a plan that only some strategies know, and this one does."""
    not_considered: tuple[str, ...]
    """Techniques that the strategy does not look at; an expert should hear it from the plan itself."""
    chosen_among: str
    """The plans among which the search chooses, for newcomers, as a sentence goes on: the search looked at …"""
    best_of: str
    """The placements that a plan's gap is about, as a sentence goes on: the best … can have."""
    stages: Literal["devices", "one mesh", "groups", "pieces"]
    """The stages of its plans: a pipeline of single devices; one stage that all devices share; a pipeline of groups that
    share their stages; or pieces of single devices, as they follow from the placement."""


STRATEGY_WORDS: Mapping[str, StrategyWords] = {
    "layer": StrategyWords(
        adverb="layer-wise",
        pinned_to="stage",
        options=frozenset({"schedule", "min_stages", "max_stages", "recompute"}),
        not_considered=("data parallelism", "tensor parallelism", "ZeRO sharding"),
        chosen_among="pipelines in which each device runs one or more stretches of the model's code, with different cuts, "
        "schedules and numbers of micro-batches",
        best_of="any pipeline of single devices",
        stages="devices",
    ),
    "feature": StrategyWords(
        adverb="feature-wise",
        pinned_to="layout",
        options=frozenset({"mesh", "recompute"}),
        not_considered=(
            "pipeline stages",
            "recomputing some blocks only, or where all fit without",
            "overlap of collectives with computing, but for gathers of parameters and sums of gradients",
        ),
        chosen_among="ways in which all devices run the whole model together, each on its share of the tensors: for every "
        "op and parameter, the ways to split it, and the grids in which devices may stand",
        best_of="any sharding",
        stages="one mesh",
    ),
    "hybrid": StrategyWords(
        adverb="hybrid",
        pinned_to="layout",
        options=frozenset({"fix", "schedule", "recompute"}),
        not_considered=(
            "unequal device groups among equal nodes, unless fixed",
            "shards over two mesh axes in a pipeline, unless fixed",
            "halves of backward apart on device groups, unless the schedule is given",
            "overlap of collectives with computing, but for gathers of parameters and sums of gradients",
        ),
        chosen_among="pipelines of groups of devices: where the model is cut into stages, how many devices share each "
        "stage, how they split its tensors, and the number of micro-batches",
        best_of="any plan",
        stages="groups",
    ),
    "free": StrategyWords(
        adverb="free",
        pinned_to="device",
        options=frozenset({"objective", "splits"}),
        not_considered=(
            "data parallelism",
            "ZeRO sharding",
            "recomputing activations, but in the layer-wise plan",
        ),
        chosen_among="placements of single ops: any op, or block of its neurons, on any device",
        best_of="any placement",
        stages="pieces",
    ),
}

AUTO_NOT_CONSIDERED = (
    "unequal device groups among equal nodes",
    "overlap of collectives with computing, but for gathers of parameters and sums of gradients",
)
"""Techniques that none of the strategies looks at."""
