"""Measurements of one device: an op forward and backward, an optimizer's step, the host's overheads, memory.

A CPU worker runs ops the way a training step does: forwards one after another with their outputs kept, as autograd keeps
them, and backwards as one sweep; both over weights and inputs that have left the cache, since a step comes back to a weight
only after all others. The usual time counts, not the least: a step meets what an op meets usually. Moments in which the
whole machine is slower are the caller's to avoid, who measures everything again a while later. On a GPU the same operands
are used again, by calls that wait in the queue (``timing``).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from cost_models.measure.calibration import Measurement, PhaseTiming
from cost_models.measure.cases import OpCase
from cost_models.measure.timing import ROUNDS, device_seconds, host_seconds, round_seconds, synchronize
from cost_models.op_profile import VIEW, Phase

CPU = torch.device("cpu")
_POOL_BYTES = 16 * 2**20
_MOST_CALLS = 24
_REPETITIONS = 2
_EVICTING_BYTES = 2 * 2**20
"""More than a core's second-level cache holds, which is 0.5 to 2 MiB on processors of today."""
_SHORTEST_SECONDS = 5e-8
PRODUCT_SIZE = 512
COPY_BYTES = 32 * 2**20
_MOST_GRAPHS = 8
"""Forwards whose graphs are kept for one round of backwards."""
_MOST_GRAPH_BYTES = 2**31
"""The most memory that they may hold, guessed from operands and results."""


@dataclass(frozen=True)
class CaseWork:
    """(FLOPs, bytes) of a case by phase; ``backward_weight`` includes adding to earlier gradients."""

    forward: tuple[float, float]
    backward_input: tuple[float, float]
    backward_weight: tuple[float, float]


@dataclass(frozen=True)
class CaseSeconds:
    """Seconds of one call. ``backward`` is the whole of it, ``backward_weight`` with gradients of weights only."""

    forward: float
    backward: float
    backward_weight: float


CountCase = Callable[[OpCase], CaseWork]


# --------------------------------------------------------------------------------------------------
# Ops of CPU workers


def time_case(case: OpCase) -> CaseSeconds:
    """Time one case on this thread; gradients of weights are added to existing ones, as with several micro-batches."""
    inputs, weights = list(case.inputs()), list(case.weights())
    size = sum(t.numel() * t.itemsize for t in (*inputs, *weights))
    calls = max(3, min(_MOST_CALLS, _POOL_BYTES // size))
    differentiable = any(t.is_floating_point() for t in inputs)
    pool = [(_copies(inputs), _copies(weights)) for _ in range(calls)]
    forward = statistics.median(seconds for _ in range(_REPETITIONS) for seconds in _forwards(case, pool))

    def backward(of_inputs: bool) -> float:
        return statistics.median(_sweep(case, pool, of_inputs) for _ in range(_REPETITIONS)) / calls

    whole = backward(differentiable)
    if not weights:
        return CaseSeconds(forward, whole, 0.0)
    only = backward(False)
    return CaseSeconds(forward, whole, only if differentiable else whole)


def worker_record(case: OpCase, work: CaseWork, seconds: CaseSeconds) -> Measurement:
    """Make the record of a CPU worker's case: forward and both halves of backward, those that there are."""
    spent: dict[Phase, float] = {
        "forward": seconds.forward,
        "backward_input": seconds.backward - seconds.backward_weight,
        "backward_weight": seconds.backward_weight,
    }
    parts: dict[Literal["backward"] | Phase, PhaseTiming] = {}
    for phase, phase_seconds in spent.items():
        flops, moved = getattr(work, phase)
        absent = phase != "forward" and not flops and not moved and case.kind != VIEW
        if not absent and (phase != "backward_weight" or seconds.backward_weight):
            parts[phase] = PhaseTiming(
                flops=flops, moved_bytes=moved, seconds=max(phase_seconds, _SHORTEST_SECONDS)
            )
    return Measurement(kind=case.kind, number=case.number, parts=parts)


def _require(tensors: Sequence[Tensor], needed: bool) -> None:
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.requires_grad_(needed)


def _forwards(case: OpCase, pool: Sequence[tuple[list[Tensor], list[Tensor]]]) -> list[float]:
    """Time each call, after something else has had the core's cache: an op's code has left it, too, when it is its turn."""
    for inputs, weights in pool:
        _require(inputs, True)
        _require(weights, True)
    other = torch.zeros(_EVICTING_BYTES // 4)
    kept, spent = [], []
    for inputs, weights in pool:
        other.add_(1.0)
        started = time.thread_time()
        kept.append(case.call(*inputs, *weights))
        spent.append(time.thread_time() - started)
    return spent


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Make equal tensors of equal strides in memory of their own."""
    return [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t.detach()) for t in tensors]


def _sweep(case: OpCase, pool: Sequence[tuple[list[Tensor], list[Tensor]]], of_inputs: bool) -> float:
    outputs = []
    for inputs, weights in pool:
        _require(inputs, of_inputs)
        _require(weights, True)
        for tensor in inputs:
            tensor.grad = None
        for weight in weights:
            weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
        outputs.append(case.call(*inputs, *weights))
    gradient = torch.ones_like(outputs[0])
    return round_seconds(lambda: torch.autograd.backward(outputs, [gradient] * len(outputs)), 1, CPU)


# --------------------------------------------------------------------------------------------------
# Ops of a GPU


def measure_case(case: OpCase, count: CountCase, device: torch.device) -> Measurement:
    """Time one op. An op that the device does not have (a backend, a type, too little memory) is a record that says so."""
    record = Measurement(kind=case.kind, number=case.number, backend=case.backend, share=case.share)
    try:
        with case.setting():
            return record.model_copy(update={"parts": _parts(case, count(case), device)})
    except (RuntimeError, NotImplementedError) as error:  # torch's for whatever it cannot do, memory included
        if device.type == "cuda":
            torch.cuda.empty_cache()
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return record.model_copy(update={"unsupported": reason[:200]})


def _parts(case: OpCase, work: CaseWork, device: torch.device) -> dict[str, PhaseTiming]:
    operands = [tensor.to(device) for tensor in (*case.inputs(), *case.weights())]
    with torch.no_grad():
        result = case.call(*operands)
        seconds = device_seconds(lambda: case.call(*operands), device)
    parts = {"forward": PhaseTiming(flops=work.forward[0], moved_bytes=work.forward[1], seconds=seconds)}
    flops, moved = (a + b for a, b in zip(work.backward_input, work.backward_weight, strict=True))
    if flops or moved:
        size = sum(t.numel() * t.itemsize for t in (*operands, result))
        graphs = int(max(1, min(_MOST_GRAPHS, _MOST_GRAPH_BYTES // max(1, size))))
        seconds = _backward_seconds(case, operands, torch.ones_like(result), graphs, device)
        parts["backward"] = PhaseTiming(flops=flops, moved_bytes=moved, seconds=seconds)
    return parts


def _backward_seconds(
    case: OpCase, operands: Sequence[Tensor], gradient: Tensor, graphs: int, device: torch.device
) -> float:
    """Time backwards of graphs that were made before: the median over rounds. Gradients are new, not added to others."""
    _require(operands, True)
    rounds = []
    for _ in range(ROUNDS + 1):
        results = [case.call(*operands) for _ in range(graphs + 1)]

        def backward(results: list[Tensor] = results) -> None:
            for tensor in operands:
                tensor.grad = None
            torch.autograd.backward([results.pop()], [gradient])

        synchronize(device)
        calls = graphs if device.type == "cuda" else graphs + 1  # a round on a GPU begins with one more call
        rounds.append(round_seconds(backward, calls, device) / calls)
    return sorted(rounds[1:])[ROUNDS // 2]


# --------------------------------------------------------------------------------------------------
# Beside ops


def product_seconds(dtype: torch.dtype) -> float:
    """Time a product of two matrices of PRODUCT_SIZE rows and columns on one thread."""
    a, b = (torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, dtype=dtype) for _ in range(2))
    return host_seconds(lambda: torch.mm(a, b), 1, CPU)


def copy_seconds() -> float:
    """Time a copy of COPY_BYTES, which no cache holds."""
    a = torch.ones(COPY_BYTES // 4)
    b = torch.empty_like(a)
    return host_seconds(lambda: b.copy_(a), 1, CPU)


def compute_overhead_seconds() -> float:
    """Time how long the host takes to start a forward and, apart, a backward of a segment: the mean of the two."""
    x, seed = torch.ones(4, requires_grad=True), torch.ones(4)
    return host_seconds(lambda: torch.autograd.backward([x * 2.0], [seed]), 50, CPU) / 2


def measure_overheads(device: torch.device, calls: int = 100) -> Measurement:
    """Time the smallest ops: what a kernel takes that does nothing, and what the host takes to start an op.

    ``forward_seconds``, ``backward_seconds``: of the host, an op with its node of the autograd graph, and that node.
    """
    x = torch.ones(16, device=device)
    kernel = device_seconds(lambda: torch.mul(x, x), device)
    trained = torch.ones(16, device=device, requires_grad=True)

    def chain() -> Tensor:
        y = trained
        for _ in range(calls):
            y = y * 1.0
        return y

    seed = torch.ones_like(x)
    forward = host_seconds(chain, 1, device) / calls
    chains = iter([chain() for _ in range(ROUNDS + 1)])
    backward = host_seconds(lambda: torch.autograd.backward([next(chains)], [seed]), 1, device) / calls
    return Measurement(
        kind="overheads",
        values={"kernel_seconds": kernel, "forward_seconds": forward, "backward_seconds": backward},
    )


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p, **how: torch.optim.SGD(p, lr=1e-3, **how),
    "momentum": lambda p, **how: torch.optim.SGD(p, lr=1e-3, momentum=0.9, **how),
    "adam": lambda p, **how: torch.optim.Adam(p, lr=1e-3, **how),
    "adamw": lambda p, **how: torch.optim.AdamW(p, lr=1e-3, **how),
}
WAYS: dict[str, dict[str, bool]] = {
    "single": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
"""The ways in which torch.optim steps."""
DEFAULT_WAY = {"cuda": "foreach", "cpu": "single"}
"""The way in which it steps if nobody says anything."""
GPU_STEPS = ((256, 1024), (16, 2**23))
WORKER_STEPS = ((32, 16), (8, 2**19))
"""(tensors, elements of each): many small ones, few large ones."""


def measure_optimizer(
    name: str, way: str, device: torch.device, sizes: Sequence[tuple[int, int]] = GPU_STEPS
) -> Measurement:
    """Time a step: seconds per tensor of parameters, seconds per byte of them, host and device, whichever takes longer."""
    record = Measurement(kind=f"optimizer {name}", number="float32", backend=way)
    seconds = []
    try:
        for tensors, elements in sizes:
            parameters = [nn.Parameter(torch.ones(elements, device=device)) for _ in range(tensors)]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer = OPTIMIZERS[name](parameters, **WAYS[way])

            def step(optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                synchronize(device)

            step()
            seconds.append(host_seconds(step, 1, device) / tensors)
    except RuntimeError as error:
        return record.model_copy(update={"unsupported": str(error).splitlines()[0][:200]})
    per_byte = max(0.0, seconds[1] - seconds[0]) / (4 * sizes[1][1])
    return record.model_copy(
        update={"values": {"seconds_per_tensor": seconds[0], "seconds_per_byte": per_byte}}
    )


def measure_memory(device: torch.device) -> Measurement:
    """Read what the context holds beside tensors, and what the allocator makes of small and large requests.

    The context is what is neither free nor reserved by torch, so on a shared card it counts other processes as well.
    """
    if device.type != "cuda":
        return Measurement(kind="memory", unsupported="only CUDA devices tell")
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    values = {"context_bytes": float(total - free - torch.cuda.memory_reserved(device))}
    for size in (1, 513, 2**20 + 1, 10 * 2**20 + 1, 100 * 2**20 + 1):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        tensor = torch.empty(size, dtype=torch.uint8, device=device)
        values[f"allocated_bytes_for_{size}"] = float(torch.cuda.memory_allocated(device) - before[0])
        values[f"reserved_bytes_for_{size}"] = float(torch.cuda.memory_reserved(device) - before[1])
        del tensor
    return Measurement(kind="memory", values=values)
