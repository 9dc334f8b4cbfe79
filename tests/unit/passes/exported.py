"""Small graphs for tests of single passes: a plain export filled into an OpGraph, without the passes of ``trace``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.export import Dim, export

from passes.graph import GraphInput, GraphOutput, OpGraph, StateSpec
from runtime.segment_code import BatchSpec


def exported(model: nn.Module, kwargs: dict[str, Any], static: tuple[str, ...] = ()) -> OpGraph:
    """Export ``model(**kwargs)``, which returns its loss; dimension 0 of each input not in ``static`` is the batch."""
    batch = Dim("batch", min=2, max=1 << 20)
    dims = {name: None if name in static else {0: batch} for name in kwargs}
    program = export(model, (), kwargs, dynamic_shapes=dims, strict=False)
    signature = program.graph_signature
    inputs, symbol = [], None
    parameters = {
        n: StateSpec(n, tuple(p.shape), p.dtype, p.requires_grad)
        for n, p in model.named_parameters(remove_duplicate=False)
    }
    buffers = {n: StateSpec(n, tuple(b.shape), b.dtype, False) for n, b in model.named_buffers()}
    for spec in signature.input_specs:
        kind = {"PARAMETER": "parameter", "BUFFER": "buffer", "CONSTANT_TENSOR": "constant"}.get(
            spec.kind.name, "batch"
        )
        inputs.append(GraphInput(spec.arg.name, kind, spec.target if kind != "batch" else spec.arg.name))
        node = next(n for n in program.graph.nodes if n.name == spec.arg.name)
        value = node.meta.get("val")
        if kind == "batch" and node.name not in static and isinstance(value, torch.Tensor):
            symbol = (value.shape[0].node.expr, node.name)
    assert symbol is not None
    outputs = tuple(
        GraphOutput(s.arg.name, "loss" if s.kind.name == "USER_OUTPUT" else "buffer", s.target or "loss")
        for s in signature.output_specs
    )
    shapes = {n: tuple(t.shape) for n, t in kwargs.items()}
    return OpGraph(
        module=program.graph_module,
        inputs=tuple(inputs),
        outputs=outputs,
        parameters=parameters,
        buffers=buffers,
        aliases={},
        constants=dict(program.constants),
        batch=BatchSpec(
            {n: None if n in static else 0 for n in kwargs}, symbol[0], {symbol[0]: (symbol[1], 0)}
        ),
        example_batch_size=shapes[symbol[1]][0],
        example_shapes=shapes,
        training=True,
        model_name=type(model).__name__,
        fingerprint="",
    )
