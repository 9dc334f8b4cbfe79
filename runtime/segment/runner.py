"""Run one segment's graph, forward and backward, for many micro-batches in flight.

    forward(m)          values and batch leaves in → every output of the graph; autograd's state stays under m
    backward(m)         gradients of the produced values in → gradients in the ``.grad`` of the input values
    backward_input(m)   the same, but weight gradients of split ops are queued (``runtime.segment.split_backward``)
    backward_weight(m)  computes what was queued

Values between segments are detached: a received or local value is a leaf of its consumer's autograd graph,
and what arrives in the leaf's ``.grad`` is the sum over every consumer on this rank. Parameter gradients
accumulate in ``parameter.grad``. This file is on the hot path: everything that can be known before the
first step is.

``warm_up`` runs every segment of a rank once on made-up inputs, before ranks wait for each other. Compiling takes minutes
where a step takes seconds: in the first step the others would wait for it and give up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from cost_models.errors import InternalError
from runtime.segment.code import BatchSpec, SegmentCode, TensorSpec
from runtime.segment.compiled import CompileOptions, compiled
from runtime.segment.microbatch import symbol_sizes
from runtime.segment.recompute import checkpointed, marked
from runtime.segment.split_backward import DeferredWork, WeightWork, run_deferred, split

logger = logging.getLogger("partitioner")

Emit = Callable[[int, Tensor], None]


class SegmentRunner:
    """One segment with its parameters, buffers and constants bound.

    ``state`` holds every tensor that the segment names, on the segment's device. ``split_backward``
    rewrites the graph for ``backward_input``. ``emit(position, tensor)``, where given, is called from
    inside the graph as soon as the value at output ``position`` exists, for the positions in ``early``.
    ``compile``: options of ``torch.compile`` for the graph; None runs it as it is.
    """

    def __init__(
        self,
        code: SegmentCode,
        state: Mapping[str, Tensor],
        *,
        split_backward: bool = False,
        early: Sequence[int] = (),
        emit: Emit | None = None,
        compile: CompileOptions | None = None,
    ) -> None:
        self.code = code
        self.value_names = [i.name for i in code.inputs if i.kind == "value"]
        self.leaf_names = [i.name for i in code.inputs if i.kind == "batch"]
        self.root_positions = [
            p for p, o in enumerate(code.outputs) if (o.kind == "value" and o.needs_grad) or o.kind == "loss"
        ]
        """Outputs that a backward starts from. ``backward`` takes one gradient (or None) for each."""
        self._state = state
        self._template = _bind_state(code, state)
        self._value_positions = [p for p, i in enumerate(code.inputs) if i.kind == "value"]
        self._leaf_positions = [p for p, i in enumerate(code.inputs) if i.kind == "batch"]
        self._buffers = _written_buffers(code)
        self._newest: dict[str, Tensor] = {}
        self._roots: dict[int, list[Tensor]] = {}
        self._weight_work: dict[int, list[WeightWork]] = {}

        module = marked(code.module, code.recomputed) if code.recomputed else code.module
        self._deferred: DeferredWork | None = None
        if split_backward:
            module, self._deferred = split(module, code)
        if code.recomputed:
            as_function = None if compile is None else partial(compiled, options=compile)
            module = checkpointed(module, random=code.random, as_function=as_function)
        if early and emit is not None:
            module = _with_emits(module, early, emit)
        # The method itself: the module's __call__ would look for hooks on every micro-batch.
        self._call: Callable[..., Any] = module.forward if compile is None else compiled(module, compile)

    def forward(
        self, microbatch: int, values: Sequence[Tensor], leaves: Sequence[Tensor], *, keep: bool = True
    ) -> Sequence[Any]:
        """Return every output of the graph, in the order of ``code.outputs``.

        ``values`` and ``leaves`` are in the order of ``value_names`` and ``leaf_names``. ``keep``: a
        backward follows.
        """
        arguments = self._template.copy()
        for position, tensor in zip(self._value_positions, values):  # noqa: B905 - strict costs time
            arguments[position] = tensor
        for position, tensor in zip(self._leaf_positions, leaves):  # noqa: B905
            arguments[position] = tensor
        outputs: Sequence[Any] = self._call(*arguments)
        if keep:
            self._roots[microbatch] = [outputs[p] for p in self.root_positions]
        for source, targets, buffer in self._buffers:
            # The next micro-batch reads the new contents, unless they are written once a step; the old ones stay as this
            # one's autograd saved them.
            self._newest[buffer] = contents = outputs[source].detach()
            for target in targets:
                self._template[target] = contents
        return outputs

    def backward(self, microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        """Compute input gradients into the input leaves' ``.grad``, weight gradients into the parameters'."""
        if self._deferred is not None:
            self._deferred.items = None
        self._run_backward(microbatch, gradients)

    def backward_input(self, microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        """Run ``backward`` with the weight gradients of split ops left for ``backward_weight``."""
        assert self._deferred is not None, "BackwardInput needs SegmentRunner(split_backward=True)"
        items: list[WeightWork] = []
        self._deferred.items = items
        self._run_backward(microbatch, gradients)
        self._deferred.items = None
        self._weight_work[microbatch] = items

    def backward_weight(self, microbatch: int) -> None:
        """Compute the weight gradients that ``backward_input`` of this micro-batch left."""
        run_deferred(self._weight_work.pop(microbatch))

    def fails_uncompiled(self, values: Sequence[Tensor], leaves: Sequence[Tensor]) -> bool:
        """Tell whether the graph as it was traced cannot take these inputs either."""
        arguments = self._template.copy()
        for position, tensor in zip(
            (*self._value_positions, *self._leaf_positions), (*values, *leaves), strict=True
        ):
            arguments[position] = tensor
        try:
            with torch.no_grad():
                self.code.module.forward(*arguments)
        except Exception as error:  # noqa: BLE001 - the question is whether, not why
            logger.debug("segment %d: %s", self.code.index, error)
            return True
        return False

    def _run_backward(self, microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        roots, seeds = [], []
        for root, gradient in zip(self._roots.pop(microbatch), gradients, strict=True):
            if gradient is not None and root.requires_grad:
                roots.append(root)
                seeds.append(gradient)
        if roots:
            torch.autograd.backward(roots, seeds)

    def write_buffers(self) -> None:
        """Write what the micro-batches did to the buffers into the model's own tensors (once per step)."""
        with torch.no_grad():
            for buffer, contents in self._newest.items():
                self._state[buffer].copy_(contents)
        self._forget_buffers()

    def discard(self) -> None:
        """Forget every micro-batch in flight (after a failed step)."""
        self._roots.clear()
        self._weight_work.clear()
        self._forget_buffers()

    def _forget_buffers(self) -> None:
        self._newest.clear()
        for _, targets, buffer in self._buffers:
            for target in targets:
                self._template[target] = self._state[buffer]


def as_leaf(tensor: Tensor, needs_grad: bool) -> Tensor:
    """Return ``tensor`` for its consumers: cut off from its producer, with their gradients in ``.grad``."""
    leaf = tensor.detach()
    return leaf.requires_grad_() if needs_grad else leaf


def gradient_of(leaf: Tensor) -> Tensor:
    """Return the gradient that consumers collected in ``leaf``; zeros where autograd gave none."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def _bind_state(code: SegmentCode, state: Mapping[str, Tensor]) -> list[Any]:
    held = code.held
    missing = [name for name in held if name not in state]
    if missing:
        raise InternalError(
            f"segment {code.index} cannot be bound to the model's state",
            because=[f"no tensor for {name}" for name in missing],
        )
    return [state[i.name] if i.kind not in ("batch", "value") else None for i in code.inputs]


def _written_buffers(code: SegmentCode) -> list[tuple[int, list[int], str]]:
    """List (output position, input positions, buffer name) for every buffer that the segment writes.

    Without input positions where all micro-batches read what was there before the step.
    """
    written = []
    for position, output in enumerate(code.outputs):
        if output.kind != "buffer":
            continue
        reads = [p for p, i in enumerate(code.inputs) if i.kind == "buffer" and i.name == output.name]
        targets = [] if output.once else reads
        written.append((position, targets, output.name))
    return written


def _with_emits(module: fx.GraphModule, early: Sequence[int], emit: Emit) -> fx.GraphModule:
    """Return a copy of ``module`` that calls ``emit(position, tensor)`` after making each output in ``early``."""
    graph = fx.Graph()
    result = graph.graph_copy(module.graph, val_map={})
    output = graph.output(result)

    def emit_value(position: int, tensor: Tensor) -> None:
        emit(position, tensor)

    outputs = output.args[0]
    assert isinstance(outputs, tuple | list)
    for position in early:
        node = outputs[position]
        assert isinstance(node, fx.Node)
        after = node if node.op != "placeholder" else [n for n in graph.nodes if n.op == "placeholder"][-1]
        with graph.inserting_after(after):
            graph.call_function(emit_value, (position, node))
    return fx.GraphModule(module, graph)


def warm_up(
    runners: Iterable[SegmentRunner],
    state: Mapping[str, Tensor],
    batch: BatchSpec,
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Iterable[int],
    device: torch.device,
) -> None:
    """Run forward and backward of each segment, for micro-batches of each of ``sizes`` samples.

    All inputs are zeros, labels and token ids too. The run leaves no trace: gradients are dropped, buffers keep their
    contents, the random generators their state.

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
