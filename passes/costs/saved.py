"""Work of one op and what autograd keeps for it, found by running that op alone on fake CPU tensors.

The op runs under ``FakeTensorMode``: no memory, no arithmetic, but the true dispatch, so that composite ops fall apart
into the kernels they really launch, and ``saved_tensors_hooks`` sees what autograd really keeps. (Fake CUDA tensors abort
the process in backward, so devices differ by the few ops of ``passes.costs.on_device``, and attention is a table:
``cost_models.attention``.)
"""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode, disable_fake_tensor_cache
from torch.nn.attention import SDPBackend, sdpa_kernel

from cost_models.attention import (
    AttentionCall,
    backward_peak_bytes,
    choose_backend,
    copied_gradient_bytes,
    output_storage_bytes,
    saved_tensors,
    transferred_bytes,
)
from cost_models.compute import OpClass, OpWork
from passes.costs.arithmetic import attention_backward_flops, attention_flops, is_uncounted
from passes.costs.attention_calls import attention_call
from passes.costs.kernels import KernelCounter, KernelCounts
from passes.costs.on_device import on_device
from passes.costs.opaque import guessed_flops, measured_work
from passes.graph.nodes import tensors_in
from passes.graph.signatures import Signature, concrete, concrete_arguments
from runtime.ops.bridges import is_bridge
from runtime.ops.local import run_local, shaped
from runtime.ops.opaque import Opaque, no_compile
from runtime.segment.code import TensorSpec

logger = logging.getLogger("partitioner")
aten = torch.ops.aten

_OPAQUE = frozenset({aten.lstm.input, aten.lstm.data})
_FLEX_LISTS = 8
"""The lists of blocks that flex_attention copies for its kernel (``runtime.ops.flex``)."""

SavedPlace: TypeAlias = Literal["operand", "output", "own"]


@dataclass(frozen=True)
class OpStructure:
    """The facts about an op that do not depend on sizes.

    ``output_alias[j]``: the operand whose storage output j shares, or None if it has its own (``shared_output[j]`` then
    names an earlier output with the same storage). ``saved``: (place, index) of each storage kept for backward, where
    index counts operands, outputs, or the op's own hidden storages (a dropout mask, a log-sum-exp).
    """

    op_class: OpClass = "memory"
    output_alias: tuple[int | None, ...] = ()
    shared_output: tuple[int, ...] = ()
    saved: tuple[tuple[SavedPlace, int], ...] = ()
    own_storages: int = 0
    attention_backend: str | None = None
    share: float = 1.0
    """Arithmetic that the device does over that which is counted (``cost_models.compute``)."""
    estimated: bool = False
    """The op could not be run alone (bytes come from shapes, and its inputs and outputs count as saved), or the device
    runs it as one kernel whose workspace is its own secret."""
    uncounted: tuple[str, ...] = ()
    """Kernels of the op that may do arithmetic which nobody counts (``passes.costs.arithmetic``)."""


@dataclass(frozen=True)
class OpProfile:
    """One op at one size."""

    structure: OpStructure
    work: OpWork
    output_bytes: int
    """Bytes of the output tensors as values: elements times element size."""
    backward_peak_bytes: int
    """The most bytes alive at once in its backward, of gradients that it makes and what is in between; 0 without one."""
    storage_bytes: tuple[int, ...]
    """Bytes of each output's storage (0 if it shares one), then of each own storage."""


def profile(
    signature: Signature,
    symbols: Mapping[sympy.Symbol, int],
    *,
    attention: str | None = None,
    device_kind: str = "cpu",
) -> OpProfile:
    """Run the signature's op on fake tensors of the sizes that ``symbols`` give, and report."""
    if not signature.runs:
        return OpProfile(OpStructure(), OpWork(), sum(_sizes(signature.outputs, symbols)), 0, ())
    if isinstance(signature.target, Opaque):
        return _profile_opaque(signature.target, signature, symbols, device_kind)
    call = attention_call(signature, symbols)
    backend = None
    if call is not None:
        backend = choose_backend(call, device_kind, attention)
        dense = call.visible is not None and backend != "flex"  # a chain of ops, attention perhaps among them
        if backend != "math" and not dense:
            return _profile_attention(signature, call, backend)
    try:
        return _FakeRun(signature, symbols, device_kind).profile(backend)
    except (ArithmeticError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        logger.debug("cannot run %s alone (%s); estimating its cost", signature.target, error)
        return _estimate(signature, symbols)


def _profile_opaque(
    opaque: Opaque, signature: Signature, symbols: Mapping[sympy.Symbol, int], device_kind: str
) -> OpProfile:
    """Profile an opaque part: run on fake tensors, else as it was measured, else by its shapes."""
    if not opaque.measured:
        try:
            with no_compile():
                return _FakeRun(signature, symbols, device_kind).profile(None)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            logger.debug("cannot run %s on fake tensors (%s)", opaque, error)
    guess = _estimate(signature, symbols)
    known = measured_work(opaque, signature, symbols)
    if known is None:
        forward, backward = guessed_flops(signature, symbols)
        half = "input" if guess.work.backward_input_bytes else "weight"
        flops = {
            "forward_flops": forward,
            f"backward_{half}_flops": backward if signature.differentiated else 0,
        }
        return replace(
            guess, work=replace(guess.work, **flops), structure=replace(guess.structure, op_class="matmul")
        )
    work, own_bytes, saved = known
    places: list[tuple[SavedPlace, int]] = [("operand", index) for index in saved]
    if signature.differentiated:
        places += [("own", 0), *(("output", j) for j in range(len(signature.outputs)))]
    structure = replace(
        guess.structure,
        op_class=opaque.measured[0].op_class,
        saved=tuple(places) if signature.differentiated else (),
        own_storages=1,
        estimated=False,
        uncounted=opaque.measured[0].uncounted,
    )
    return replace(guess, structure=structure, work=work, storage_bytes=(*guess.storage_bytes, own_bytes))


class _FakeRun:
    """One op on fake tensors: forward with saved tensors, then backward."""

    def __init__(self, signature: Signature, symbols: Mapping[sympy.Symbol, int], device_kind: str) -> None:
        self._signature = signature
        self._symbols = symbols
        self._device_kind = device_kind
        self._counter = KernelCounter()

    def profile(self, backend: str | None) -> OpProfile:
        saved: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        mode = FakeTensorMode(allow_non_fake_inputs=isinstance(self._signature.target, Opaque))
        with mode, disable_fake_tensor_cache(mode):  # nothing runs twice
            leaves = [self._operand(index) for index in range(len(self._signature.operands))]
            operands = [leaf.clone() for leaf in leaves] if self._writes_operands() else leaves
            hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
            with _one_attention(backend), _plain_recurrence(self._signature), self._counter, hooks:
                result = self._call(operands)
                forward = self._counter.take()
            outputs = tensors_in(result)
            with self._counter:
                total, weight = self._backward(outputs, leaves)
            structure, storage_bytes = self._storages(operands, outputs, saved, backend)
            output_bytes = sum(t.numel() * t.dtype.itemsize for t in outputs)
        if is_bridge(self._signature.exemplar):  # its work is the collective's (``passes.shard.traffic``)
            return OpProfile(structure, OpWork(), output_bytes, total.peak_bytes, storage_bytes)
        work = OpWork(
            forward.flops,
            total.flops - weight.flops,
            weight.flops,
            forward.bytes,
            max(0, total.bytes - weight.bytes),
            weight.bytes,
            max(1, forward.launches),
            max(0, total.launches - weight.launches),
            weight.launches,
        )
        return OpProfile(structure, work, output_bytes, total.peak_bytes, storage_bytes)

    def _operand(self, index: int) -> torch.Tensor:
        operand = self._signature.operands[index]
        shape = [concrete(size, self._symbols) for size in operand.spec.shape]
        stride = [concrete(size, self._symbols) for size in operand.stride]
        needs_grad = self._signature.differentiated and operand.role != "none"
        tensor = torch.empty_strided(shape, stride, dtype=operand.spec.dtype, device="cpu")
        return tensor.requires_grad_(needs_grad)

    def _writes_operands(self) -> bool:
        target = self._signature.target
        return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable

    def _call(self, operands: Sequence[torch.Tensor]) -> Any:
        args, kwargs = concrete_arguments(self._signature.exemplar, operands, self._symbols)
        if isinstance(self._signature.target, Opaque):
            return self._signature.target.run(args)
        op = on_device(self._signature.target, self._device_kind, args)
        node: Any = self._signature.exemplar
        return (shaped(node.args[0], node.args[2], op) if node.target is run_local else op)(*args, **kwargs)

    def _backward(
        self, outputs: Sequence[torch.Tensor], leaves: Sequence[torch.Tensor]
    ) -> tuple[KernelCounts, KernelCounts]:
        """Count the whole backward, and the weight half alone."""
        roots = [output for output in outputs if output.requires_grad]
        roles = [operand.role for operand in self._signature.operands]
        trained = [leaf for leaf in leaves if leaf.requires_grad]
        weights = [
            leaf for leaf, role in zip(leaves, roles, strict=True) if leaf.requires_grad and role == "weight"
        ]
        if not roots or not trained:
            return self._counter.take(), self._counter.take()
        gradients = [torch.empty_like(root) for root in roots]
        self._counter.take()
        torch.autograd.grad(roots, trained, gradients, retain_graph=True, allow_unused=True)
        total = self._counter.take()
        total = replace(
            total, launches=max(1, total.launches)
        )  # a view's backward is a view: started, if for nothing
        if not weights:
            return total, self._counter.take()
        if len(weights) == len(trained):
            return total, total
        torch.autograd.grad(roots, weights, gradients, retain_graph=True, allow_unused=True)
        weight = self._counter.take()
        together = 0 < weight.flops == total.flops and weight.launches == total.launches
        if together:  # the kernels that make gradients of weights make the others as well
            weight = replace(weight, flops=weight.flops // 2, bytes=weight.bytes // 2)
        return total, weight

    def _storages(
        self,
        operands: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        saved: Sequence[torch.Tensor],
        backend: str | None,
    ) -> tuple[OpStructure, tuple[int, ...]]:
        operand_of = {_storage(t): index for index, t in reversed(list(enumerate(operands)))}
        output_of = {_storage(t): index for index, t in reversed(list(enumerate(outputs)))}
        own: dict[int, int] = {}
        places: dict[tuple[SavedPlace, int], None] = {}
        for tensor in saved if self._signature.differentiated else ():
            storage = _storage(tensor)
            if storage in operand_of:
                places["operand", operand_of[storage]] = None
            elif storage in output_of:
                places["output", output_of[storage]] = None
            else:
                if storage not in own:
                    own[storage] = tensor.untyped_storage().nbytes()
                places["own", list(own).index(storage)] = None
        alias = tuple(operand_of.get(_storage(output)) for output in outputs)
        shared = tuple(output_of[_storage(output)] for output in outputs)
        fresh = [
            output.untyped_storage().nbytes() if alias[j] is None and shared[j] == j else 0
            for j, output in enumerate(outputs)
        ]
        opaque = self._signature.target in _OPAQUE
        structure = OpStructure(
            self._counter.op_class,
            alias,
            shared,
            tuple(places),
            len(own),
            backend,
            self._counter.share if self._device_kind == "cuda" else 1.0,
            opaque,
            tuple(self._counter.uncounted),
        )
        return structure, (*fresh, *own.values())


def _profile_attention(signature: Signature, call: AttentionCall, backend: str) -> OpProfile:
    """Profile a fused backend by its table: one kernel forward, one backward, operands and statistics kept."""
    out = (*call.query[:-1], call.value[-1])
    forward_bytes, backward_bytes = transferred_bytes(call)
    backward_bytes += 2 * copied_gradient_bytes(backend, call)  # written, and read by the sum behind
    backward = signature.differentiated
    gradients = backward and any(operand.role != "none" for operand in signature.operands)
    shapes = call.query, call.key, call.value  # all fused backends do the same arithmetic
    seen = 1.0 if call.visible is None else call.visible
    work = OpWork(
        forward_flops=round(seen * attention_flops(*shapes)),
        backward_input_flops=round(seen * attention_backward_flops(*shapes)) if gradients else 0,
        forward_bytes=forward_bytes,
        backward_input_bytes=backward_bytes if gradients else 0,
        forward_launches=1 + (_FLEX_LISTS if call.listed_bytes else 0),
        backward_input_launches=1 if gradients else 0,
    )
    places: list[tuple[SavedPlace, int]] = []
    own: list[int] = []
    operand = {"query": 0, "key": 1, "value": 2, "mask": 3}
    for kept in saved_tensors(backend, call) if gradients else ():
        if isinstance(kept, int):
            places.append(("own", len(own)))
            own.append(kept)
        else:
            places.append(("output", 0) if kept == "out" else ("operand", operand[kept]))
    out_bytes = math.prod(out) * call.dtype.itemsize
    structure = OpStructure(
        "attention", (None,), (0,), tuple(places), len(own), backend, share=0.5 if call.causal else 1.0
    )
    peak_bytes = backward_peak_bytes(backend, call) if gradients else 0
    return OpProfile(structure, work, out_bytes, peak_bytes, (output_storage_bytes(backend, call), *own))


def _estimate(signature: Signature, symbols: Mapping[sympy.Symbol, int]) -> OpProfile:
    """Estimate an op that cannot run alone (its output's size depends on data): shapes only, everything kept."""
    outputs = _sizes(signature.outputs, symbols)
    moved = sum(outputs) + sum(_sizes([operand.spec for operand in signature.operands], symbols))
    places: list[tuple[SavedPlace, int]] = []
    if signature.differentiated:
        places += [("operand", i) for i in range(len(signature.operands))]
        places += [("output", j) for j in range(len(outputs))]
    roles = {operand.role for operand in signature.operands} if signature.differentiated else set()
    work = OpWork(
        forward_bytes=moved,
        backward_input_bytes=moved if "input" in roles else 0,
        backward_weight_bytes=moved if roles - {"none"} == {"weight"} else 0,
        forward_launches=1,
        backward_input_launches=1 if "input" in roles else 0,
        backward_weight_launches=1 if roles - {"none"} == {"weight"} else 0,
    )
    alias: tuple[int | None, ...] = (None,) * len(outputs)
    unknown = (signature.target._schema.name,) if is_uncounted(signature.target) else ()
    structure = OpStructure(
        "memory", alias, tuple(range(len(outputs))), tuple(places), estimated=True, uncounted=unknown
    )
    read = [
        size
        for size, o in zip(
            _sizes([o.spec for o in signature.operands], symbols), signature.operands, strict=True
        )
        if o.role != "none"
    ]
    peak_bytes = sum(read) if signature.differentiated else 0
    return OpProfile(structure, work, sum(outputs), peak_bytes, tuple(outputs))


def _sizes(specs: Sequence[TensorSpec], symbols: Mapping[sympy.Symbol, int]) -> list[int]:
    """Count bytes of each tensor."""
    return [math.prod(concrete(d, symbols) for d in spec.shape) * spec.dtype.itemsize for spec in specs]


def _one_attention(backend: str | None) -> Any:
    """Pin the composite attention, so that the machine that traces does not choose."""
    return (
        sdpa_kernel(SDPBackend.MATH)
        if backend == "math"
        else sdpa_kernel([*SDPBackend.__members__.values()][1:])
    )


@contextlib.contextmanager
def _plain_recurrence(signature: Signature) -> Iterator[None]:
    """Run an LSTM as its cells: the fused kernel hides its arithmetic, and reports a workspace of no bytes."""
    if signature.target not in _OPAQUE:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about Intel GPUs, from setting a flag
        with torch.backends.mkldnn.flags(enabled=False):
            yield


def _storage(tensor: torch.Tensor) -> int:
    """Identify a tensor's storage; valid while the tensor lives."""
    return int(tensor.untyped_storage()._cdata)
