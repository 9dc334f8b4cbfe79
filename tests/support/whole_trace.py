"""A trace in which equal blocks are written from a record, beside the same trace in which every block runs."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import fx, nn

from passes.graph.graph import OpGraph
from passes.graph.nodes import storage_key, symbolic
from passes.trace import attempts
from passes.trace.repeat.reuse import Reuse, reuse_blocks
from passes.trace.trace import trace

_FIELDS = (
    *("inputs", "outputs", "parameters", "buffers", "aliases", "views", "batch", "example_batch_size"),
    *("example_shapes", "notes", "checkpointing", "frozen_modules", "token_counts", "fingerprint"),
    *("loss_reduction", "opaque"),
)


def differences(model: nn.Module, batch: object, **options: Any) -> tuple[list[Any], Counter[str]]:
    """Trace copies of the model in both ways; return what differs, and how many blocks were written, by class."""
    reused: list[Reuse] = []

    @contextlib.contextmanager
    def kept(*arguments: Any) -> Iterator[Reuse]:
        with reuse_blocks(*arguments) as reuse:
            yield reuse
        reused.append(reuse)

    with mock.patch.object(attempts, "reuse_blocks", kept):
        graph = trace(copy.deepcopy(model), batch, **options)
    with mock.patch.object(attempts, "reuse_blocks", return_value=contextlib.nullcontext()):
        whole = trace(copy.deepcopy(model), batch, **options)
    written = sum((reuse.written for reuse in reused), start=Counter())
    return _unlike(_nodes(graph), _nodes(whole)) + _unlike(_rest(graph), _rest(whole)), written


def _unlike(some: list[Any], others: list[Any]) -> list[Any]:
    found = [pair for pair in zip(some, others, strict=False) if pair[0] != pair[1]]
    return found[:3] + ([] if len(some) == len(others) else [(len(some), len(others))])


def _nodes(graph: OpGraph) -> list[Any]:
    """Describe every node: its name, op, arguments, readers, and all that its ``meta`` holds."""
    memory: dict[int | None, int] = {}

    def value(given: Any) -> Any:
        if isinstance(given, list | tuple):
            return [value(item) for item in given]
        if not isinstance(given, torch.Tensor):
            return str(given)
        sizes = (*given.shape, *given.stride(), given.storage_offset(), given.untyped_storage().nbytes())
        shares = memory.setdefault(storage_key(given), len(memory))
        return type(given), [*map(str, map(symbolic, sizes))], given.dtype, given.requires_grad, shares

    return [
        (
            node.op,
            node.name,
            str(node.target),
            fx.map_arg((node.args, node.kwargs), lambda source: source.name),
            [user.name for user in node.users],
            {key: value(held) if key == "val" else repr(held) for key, held in node.meta.items()},
        )
        for node in graph.graph.nodes
    ]


def _rest(graph: OpGraph) -> list[Any]:
    return [(name, repr(getattr(graph, name))) for name in _FIELDS] + [("constants", sorted(graph.constants))]
