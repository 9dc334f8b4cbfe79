"""The choice of an evaluation graph for a batch that ranks know different parts of.

    rank 0   input_ids (8, 64)            graph 0: input_ids (8, 32)  labels (8, 32)     refused by ranks 0 and 2
    rank 1   AbsentBatch                  graph 1: input_ids (8, 64)  labels (8, 64)     chosen by all three
    rank 2   labels (8, 64)               graph 2: the same and attention_mask           its mask is given by nobody

``votes`` is what one rank says of all graphs known so far, ``chosen`` reads the maximum over all ranks. If no graph is
left, ranks tell each other what they were given (``described``), rank 0 puts it together (``put_together``), and a rank
that lacks something traces with zeros of its shape (``completed``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cost_models.errors import UsageError
from partitioner.batches.reader import same_constant
from passes.trace.batch import flatten_batch, map_tensors
from runtime.segment.code import BatchSpec
from runtime.segment.microbatch import mismatch

EVERYWHERE = "engine.dataloader(..., everywhere=True) loads every batch on every rank"


@dataclass(frozen=True)
class GivenBatch:
    """A batch as a rank has it. ``inputs``: those that are traced with it; ``read``: leaves that forward gets."""

    inputs: Any
    leaves: Mapping[str, Tensor]
    read: frozenset[str]
    constants: Mapping[str, object]
    """Plain values that forward gets, defaults too."""


@dataclass(frozen=True)
class Wanted:
    """The batch that a graph was, or would be, traced with. ``spec``: that of a user's leaves."""

    with_loss: bool
    spec: BatchSpec
    constants: Mapping[str, object]


# --------------------------------------------------------------------------------------------------
# A graph that is there


def votes(
    candidates: Sequence[Wanted], given: GivenBatch | None, with_loss: bool, optional: frozenset[str]
) -> list[int]:
    """Vote per candidate: 1 if this rank refuses it, then 1 for each optional leaf that this rank was given, else 0.

    ``given``: None where this rank did not load the batch. ``optional``: arguments that forward does not need.
    """
    numbers = []
    for wanted in candidates:
        numbers.append(int(not _fits(wanted, given, with_loss)))
        leaves = () if given is None else given.leaves
        numbers += [int(name in leaves) for name in _optional(wanted, optional)]
    return numbers


def chosen(candidates: Sequence[Wanted], most: Sequence[int], optional: frozenset[str]) -> int | None:
    """Choose the last candidate that nobody refuses, whose optional leaves somebody has. ``most``: maxima of ``votes``."""
    at, found = 0, None
    for number, wanted in enumerate(candidates):
        end = at + 1 + len(_optional(wanted, optional))
        if not most[at] and all(most[at + 1 : end]):
            found = number
        at = end
    return found


def _optional(wanted: Wanted, optional: frozenset[str]) -> list[str]:
    """List the leaves without which a batch is another one; without any other leaf, this rank did not load all of it."""
    return [name for name in wanted.spec.leaves if _root(name) in optional]


def _fits(wanted: Wanted, given: GivenBatch | None, with_loss: bool) -> bool:
    if wanted.with_loss != with_loss or given is None:
        return wanted.with_loss == with_loss
    spec = wanted.spec
    roots = {_root(name) for name in spec.leaves}
    own = {name: value for name, value in given.constants.items() if value is not None or name not in roots}
    return (
        not any(mismatch(n, given.leaves[n], leaf) for n, leaf in spec.leaves.items() if n in given.leaves)
        and given.read <= spec.batch_dims.keys()
        and own.keys() == wanted.constants.keys()
        and all(same_constant(value, wanted.constants[name]) for name, value in own.items())
    )


def _root(name: str) -> str:
    return name.split(".")[0]


# --------------------------------------------------------------------------------------------------
# A graph that must be made


def described(given: GivenBatch | None, with_loss: bool) -> dict[str, Any]:
    """Describe what this rank was given, as JSON data."""
    said: dict[str, Any] = {
        "call": "eval_step" if with_loss else "forward",
        "leaves": None,
        "constants": None,
    }
    if given is not None:
        said["leaves"] = {n: [list(leaf.shape), str(leaf.dtype)] for n, leaf in given.leaves.items()}
        said["constants"] = {name: repr(value) for name, value in given.constants.items()}
    return said


def put_together(said: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Put the whole batch together out of what every rank ``described``; or return the ``differences`` between them."""
    leaves: dict[str, Any] = {}
    agree = len({words["call"] for words in said}) == 1
    for words in said:
        for name, leaf in (words["leaves"] or {}).items():
            agree = agree and leaves.setdefault(name, leaf) == leaf
    roots = {_root(name) for name in leaves}
    constants = [
        {name: text for name, text in words["constants"].items() if text != "None" or name not in roots}
        for words in said
        if words["constants"] is not None
    ]
    if agree and all(other == constants[0] for other in constants):
        return {"leaves": leaves, "constants": constants[0] if constants else {}, "differences": []}
    return {"differences": [f"rank {rank}: {_text(words)}" for rank, words in enumerate(said)]}


def _text(words: Mapping[str, Any]) -> str:
    if words["leaves"] is None:
        return f"{words['call']} of a batch that it did not load"
    shapes = [f"{n}: {tuple(shape)} {dtype}" for n, (shape, dtype) in words["leaves"].items()]
    values = [f"{name}={text}" for name, text in words["constants"].items()]
    return f"{words['call']} of a batch of {', '.join((*shapes, *values))}"


def completed(own: Any, example: Any, whole: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Make the batch to trace with: ``own`` if it has every leaf of ``whole``, else ``example`` with zeros for tensors.

    ``own``: None if it was not loaded. ``whole``: from ``put_together``. ``names``: those of forward's arguments.
    """
    if own is not None and flatten_batch(own, names).keys() == whole["leaves"].keys():
        return own
    zeros = {
        name: torch.zeros(tuple(shape), dtype=getattr(torch, dtype.removeprefix("torch.")))
        for name, (shape, dtype) in whole["leaves"].items()
    }
    known = flatten_batch(example, names)
    if not isinstance(example, Mapping):
        if known.keys() != zeros.keys():
            raise _unlike_the_example(zeros.keys() ^ known.keys())
        in_order = iter(known)
        return map_tensors(example, lambda _, __: zeros[next(in_order)])
    kept = {
        key: value
        for key, value in example.items()
        if not (found := flatten_batch({key: value})) or not found.keys().isdisjoint(zeros)
    }
    in_order = iter(flatten_batch(kept))
    strange = flatten_batch(kept).keys() - zeros.keys()
    added = {name: leaf for name, leaf in zeros.items() if name not in known}
    strange |= {name for name in added if "." in name}
    if strange:
        raise _unlike_the_example(strange)
    return {**map_tensors(kept, lambda _, __: zeros[next(in_order)]), **added}


def refuse_other_constants(constants: Mapping[str, object], whole: Mapping[str, Any]) -> None:
    """Raise if this rank would trace with other plain values than those of the batch that the others loaded."""
    here = {name: repr(value) for name, value in constants.items()}
    if here != whole["constants"]:
        names = [n for n in {**here, **whole["constants"]} if here.get(n) != whole["constants"].get(n)]
        raise UsageError(
            "this rank did not load the batch, and cannot trace with it",
            [f"{n} is {whole['constants'].get(n)} there, {here.get(n)} in the plan's example" for n in names],
            [EVERYWHERE],
        )


def _unlike_the_example(names: Any) -> UsageError:
    return UsageError(
        "this rank did not load all of the batch, and cannot trace with it",
        [f"in the plan's example {', '.join(sorted(names))} stand otherwise"],
        [EVERYWHERE],
    )
