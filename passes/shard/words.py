"""The words of sharding: how an op may run on one axis of a mesh, and how a whole model does.

On each mesh axis a tensor is whole on every rank (R), split along a dimension (S(d)), or a sum of which each rank has
a part (P); over several axes a tuple of these, the first axis outermost. Gradients follow from it:

    produced as   its gradient is expected as        taken as   the consumer's backward gives
    S(d)          S(d)                               S(d)       S(d)
    P             R                                  P          R
    R             R                                  R          R, or P where ``partial_gradient``

Placements and choices are written as text, for plan files and people, and read back:

    placements    "S0 R"                      one word per mesh axis: R, P, or S and a dimension
    crossing      "R~ S0"                     how a value arrives from another stage; ~: its gradient goes back in parts
    choice        "S0 R~ R~ -> S0"            needs of the operands -> placements of the outputs; ~: ``partial_gradient``
                  "S0 R -> P by cross_entropy:samples"       by a local form
                  "S1 S0 S0 -> S1 in 4,4"     counts among the arguments that the axis must divide
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

import torch
from torch import fx

from cost_models.layout import Mesh, Partial, Placement, Replicate, Shard

Placements: TypeAlias = tuple[Placement, ...]
"""One per mesh axis."""
QUERIES, TOKENS_OF_KEYS = "attention:queries", "attention:tokens"
"""The local forms of attention that split heads of queries, and of keys and values none, or the tokens."""
_CHOICE = re.compile(
    r"(?P<inputs>[^>]*?) ?-> ?(?P<outputs>[^a-z]*?)(?: by (?P<local>[a-z_]+:[a-z_]+))?(?: in (?P<divides>[0-9,]+))?"
)


@dataclass(frozen=True)
class Need:
    """The placement that an op needs of one operand on one mesh axis.

    ``partial_gradient``: the gradient that its local backward makes for a replicated operand is one rank's part of a
    sum. (Column-parallel linear: every rank has all of x, and a gradient of x from its own columns only.)
    """

    placement: Placement
    partial_gradient: bool = False

    def __str__(self) -> str:
        return f"{short(self.placement)}{'~' if self.partial_gradient else ''}"


@dataclass(frozen=True)
class Choice:
    """One way to run an op on one mesh axis: what it needs of each operand, what each output is.

    ``local``: "" where the ranks run the op itself on their shards; else "function:role", a function of
    ``runtime.ops.local`` to call in its place, and what the axis is to it. All of an op's axes with a ``local`` name one
    function; those of one role are taken together, the first outermost. ``divides``: counts among the op's arguments
    (groups) that the product of these axes' sizes must divide, besides the sharded dimensions.
    """

    inputs: tuple[Need, ...]
    outputs: Placements
    local: str = ""
    divides: tuple[int, ...] = ()

    def __str__(self) -> str:
        ways = f"{' '.join(map(str, self.inputs))} -> {' '.join(map(short, self.outputs))}"
        return f"{ways} by {self.local}" if self.local else ways


@dataclass(frozen=True)
class FeaturePlacement:
    """A placement of a whole model on a mesh.

    ``choices``         per op, one choice per mesh axis
    ``stored``          placements of parameters and buffers between steps
    ``sharded_state``   placements of gradients and optimizer state where they differ from ``stored`` (ZeRO-1 and 2)
    ``batch``           placements in which batch leaves arrive
    ``values``          placements in which values of other stages arrive and own ones leave; their gradients likewise
    ``returned``        placements in which gradients of values of other stages go back where they differ from ``values``:
                        each rank sends its part of a sum (P), and the stage that made the value adds them up
    """

    mesh: Mesh
    choices: Mapping[str, tuple[Choice, ...]]
    stored: Mapping[str, Placements]
    batch: Mapping[str, Placements]
    microbatches: int
    sharded_state: Mapping[str, Placements] = field(default_factory=dict)
    values: Mapping[str, Placements] = field(default_factory=dict)
    returned: Mapping[str, Placements] = field(default_factory=dict)


def operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """List the tensor operands of an op in the order of its arguments; lists are flattened, one node may come twice."""
    found: list[fx.Node] = []

    def visit(argument: object) -> None:
        if isinstance(argument, fx.Node):
            if isinstance(argument.meta.get("val"), torch.Tensor):
                found.append(argument)
        elif isinstance(argument, list | tuple):
            for item in argument:
                visit(item)

    visit(node.args)
    visit(tuple(node.kwargs.values()))
    return tuple(found)


def is_projection(node: fx.Node) -> bool:
    """Tell whether a node takes one of the tensors that another one made."""
    source = node.args[0] if node.target is operator.getitem else None
    return (
        isinstance(source, fx.Node)
        and isinstance(source.meta.get("val"), list | tuple)
        and isinstance(node.meta.get("val"), torch.Tensor)
    )


def short(placement: Placement) -> str:
    """Write a placement: R, S0, P."""
    if isinstance(placement, Shard):
        return f"S{placement.dim}"
    return "P" if isinstance(placement, Partial) else "R"


def all_replicated(inputs: int, outputs: int) -> Choice:
    """Make the choice that every rank computes everything: right for any op."""
    return Choice((Need(Replicate()),) * inputs, (Replicate(),) * outputs)


def are_nested(choices: Sequence[Choice]) -> bool:
    """Tell whether no axis that splits heads of queries alone has one within it that splits them in another way.

    One choice per axis, the first outermost: of the heads of its queries, a rank then has or gets the keys.
    """
    alone = next((a for a, c in enumerate(choices) if c.local in (QUERIES, TOKENS_OF_KEYS)), len(choices))
    within = choices[alone:]
    return all(c.local == within[0].local or c.outputs != within[0].outputs for c in within)


def placements_text(placements: Placements) -> str:
    """Write placements: "S0 R"."""
    return " ".join(map(short, placements))


@lru_cache(maxsize=4096)
def read_placements(text: str) -> Placements:
    """Read what ``placements_text`` wrote. Raises ValueError."""
    return tuple(map(read_placement, text.split()))


def crossing_text(layout: Placements, returned: Placements) -> str:
    """Write how a value arrives and its gradient goes back: "R~ S0", ~ where ranks send parts of a sum."""
    pairs = zip(layout, returned, strict=True)
    return " ".join(str(Need(here, isinstance(back, Partial))) for here, back in pairs)


def read_crossing(text: str) -> tuple[Placements, Placements]:
    """Read what ``crossing_text`` wrote. Raises ValueError."""
    layout = read_placements(text.replace("R~", "R"))
    parts = [word.endswith("~") for word in text.split()]
    return layout, tuple(Partial() if part else p for p, part in zip(layout, parts, strict=True))


def choice_text(choice: Choice) -> str:
    """Write everything about a choice."""
    return f"{choice} in {','.join(map(str, choice.divides))}" if choice.divides else str(choice)


@lru_cache(maxsize=4096)  # a plan names a few ways for its thousands of ops
def read_choice(text: str) -> Choice:
    """Read what ``choice_text`` wrote. Raises ValueError."""
    found = _CHOICE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no choice such as 'S0 R~ -> S0'")
    needs = tuple(
        Need(read_placement(word.removesuffix("~")), word.endswith("~")) for word in found["inputs"].split()
    )
    divides = tuple(int(count) for count in (found["divides"] or "").split(",") if count)
    return Choice(needs, read_placements(found["outputs"]), found["local"] or "", divides)


def read_placement(word: str) -> Placement:
    """Read what ``short`` wrote; torch's tensors have at most 64 dimensions. Raises ValueError."""
    if word in ("R", "P"):
        return Replicate() if word == "R" else Partial()
    if not re.fullmatch(r"S([0-9]|[1-5][0-9]|6[0-3])", word):
        raise ValueError(f"{word!r} is not R, P, or S and a dimension")
    return Shard(int(word[1:]))
