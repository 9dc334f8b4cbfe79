"""Batch leaves that no user's batch has: whoever runs a step fills them in (``passes.graph.token_counts``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from passes.graph.graph import GraphInput, tensor_specs
from passes.graph.nodes import fake_mode_of, quiet
from passes.trace.build import Converted, used_inputs
from runtime.segment.code import BatchSpec


class MadeLeaves:
    """Makes the placeholders of further batch leaves, after all others."""

    def __init__(self, traced: Converted, spec: BatchSpec) -> None:
        self.nodes: dict[str, fx.Node] = {}
        self._traced, self._before = traced, spec
        self._graph = traced.module.graph
        self._inputs: list[GraphInput] = []
        self._dims: dict[str, int | None] = {}
        self._mode = fake_mode_of(self._graph)
        node_of = {i.name: i.node for i in traced.inputs if i.kind == "batch"}
        nodes = {node.name: node for node in self._graph.find_nodes(op="placeholder")}
        self._samples: Any = next(
            nodes[node_of[name]].meta["val"].shape[dim]
            for name, dim in spec.batch_dims.items()
            if dim is not None and name in node_of
        )

    def per_sample(self, name: str, dtype: torch.dtype) -> str:
        """Make a leaf with a number for each sample, under a name like ``name``."""
        return self._add(name, (self._samples,), 0, dtype)

    def whole(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        """Make a leaf that every micro-batch gets whole."""
        return self._add(name, shape, None, dtype)

    def spec(self) -> BatchSpec:
        """Return the batch with the new leaves."""
        return replace(
            self._before,
            batch_dims={**self._before.batch_dims, **self._dims},
            leaves={**self._before.leaves, **{n: tensor_specs(self.nodes[n])[0] for n in self._dims}},
        )

    def inputs(self) -> tuple[GraphInput, ...]:
        """Return the inputs that the graph has now, used or not."""
        return (*self._traced.inputs, *self._inputs)

    def used(self) -> tuple[tuple[GraphInput, ...], BatchSpec]:
        """Return the inputs that the graph uses, and the batch, whose sizes are read from leaves that it still has."""
        inputs = used_inputs(self._graph, {i.node: i for i in self.inputs()})
        spec = self.spec()
        names = {i.name for i in inputs if i.kind == "batch"}
        symbols = {symbol: place for symbol, place in spec.symbols.items() if place[0] in names}
        for name in names:
            for dim, size in enumerate(spec.leaves[name].shape):
                if size in spec.symbols or size == spec.batch_symbol:
                    symbols.setdefault(size, (name, dim))
        return inputs, replace(spec, symbols=symbols)

    def _add(self, name: str, shape: tuple[Any, ...], dim: int | None, dtype: torch.dtype) -> str:
        taken, number = {*self._before.batch_dims, *self._dims}, 0
        unique = name
        while unique in taken:
            number += 1
            unique = f"{name}_{number}"
        last = list(self._graph.find_nodes(op="placeholder"))[-1]
        assert self._mode is not None
        with self._graph.inserting_before(last.next):
            node = self._graph.placeholder(unique)
        with quiet(self._mode):
            value = torch.empty(shape, dtype=dtype, device="cpu")
        node.meta.update(val=value, module_path="", source="")
        self._dims[unique] = dim
        self.nodes[unique] = node
        self._inputs.append(GraphInput(node.name, "batch", unique))
        return unique
