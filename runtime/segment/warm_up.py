"""Run every segment of a rank once on made-up inputs, before ranks wait for each other.

Compiling takes minutes where a step takes seconds: in the first step the others would wait for it and give up.
All inputs are zeros, labels and token ids too. The run leaves no trace: gradients are dropped, buffers keep their
contents, the random generators their state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import sympy
import torch
from torch import Tensor

from runtime.segment.code import BatchSpec, TensorSpec
from runtime.segment.microbatch import symbol_sizes
from runtime.segment.runner import SegmentRunner

logger = logging.getLogger("partitioner")


def warm_up(
    runners: Iterable[SegmentRunner],
    state: Mapping[str, Tensor],
    batch: BatchSpec,
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Iterable[int],
    device: torch.device,
) -> None:
    """Run forward and backward of each segment, for micro-batches of each of ``sizes`` samples.

    state   the tensors that the segments are bound to
    shapes  shapes of a whole batch's leaves, for sizes that are open and not the batch's
    """
    wanted = [symbol_sizes(batch, shapes, size) for size in dict.fromkeys(sizes)]
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for runner in runners:
            # All of them: batch norms write their statistics without saying so.
            buffers = [name for name, kind in runner.code.held.items() if kind == "buffer"]
            before = {name: state[name].clone() for name in buffers}
            for symbols in wanted:
                _run_once(runner, batch, symbols, device)
            with torch.no_grad():
                for name, contents in before.items():
                    state[name].copy_(contents)
            for tensor in state.values():
                tensor.grad = None


def _run_once(
    runner: SegmentRunner, batch: BatchSpec, symbols: Mapping[sympy.Symbol, int], device: torch.device
) -> None:
    def zeros(spec: TensorSpec, needs_grad: bool = False) -> Tensor:
        made = torch.zeros(spec.concrete(symbols), dtype=spec.dtype, device=device)
        return made.requires_grad_(needs_grad)

    inputs = [i for i in runner.code.inputs if i.kind == "value"]
    values = [zeros(runner.code.values[i.name], i.needs_grad) for i in inputs]
    leaves = [zeros(batch.leaves[name]) for name in runner.leaf_names]
    try:
        outputs = runner.forward(0, values, leaves)
        roots = [outputs[at] for at in runner.root_positions]
        runner.backward(0, [torch.ones_like(root) for root in roots])
    except Exception as error:
        runner.discard()
        # Zeros may be no inputs for this model: singular matrices, say.
        if runner.fails_uncompiled(values, leaves):
            logger.warning(
                "segment %d compiles in the first step: it fails on zeros (%s)", runner.code.index, error
            )
            return
        raise
    runner.discard()
