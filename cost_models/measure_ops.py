"""Times of every case on this process's one thread, run the way a training step runs it.

Forwards run one after another with their outputs kept, as autograd keeps them, and backwards as one sweep; both over
weights and inputs that have left the cache, since a training step comes back to a weight only after all others.
Processor time of the thread is counted, not the clock: what other programs take between is theirs. The usual time
counts, not the least: a step meets what an op meets usually. Moments in which the whole machine is slower are the
caller's to avoid, who measures everything again a while later.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cost_models.op_cases import OpCase

_POOL_BYTES = 16 * 2**20
_MOST_CALLS = 24
_REPETITIONS = 2
_EVICTING_BYTES = 2 * 2**20
"""More than a core's second-level cache holds, which is 0.5 to 2 MiB on processors of today."""


@dataclass(frozen=True)
class CaseSeconds:
    """Seconds of one call. ``backward`` is the whole of it, ``backward_weight`` with gradients of weights only."""

    forward: float
    backward: float
    backward_weight: float


def measure_case(case: OpCase) -> CaseSeconds:
    """Time one case; gradients of weights are added to existing ones, as with several micro-batches."""
    inputs, weights = list(case.inputs()), list(case.weights())
    size = sum(t.numel() * t.itemsize for t in (*inputs, *weights))
    calls = max(3, min(_MOST_CALLS, _POOL_BYTES // size))
    differentiable = any(t.is_floating_point() for t in inputs)
    pool = [(_copies(inputs), _copies(weights)) for _ in range(calls)]
    forward = statistics.median(seconds for _ in range(_REPETITIONS) for seconds in _forwards(case, pool))
    whole = _usual(lambda: _backward(case, pool, differentiable))
    only = _usual(lambda: _backward(case, pool, False)) if weights else 0.0
    return CaseSeconds(
        forward, whole / calls, (only if differentiable else whole) / calls if weights else 0.0
    )


def _usual(run: Callable[[], float]) -> float:
    return statistics.median(run() for _ in range(_REPETITIONS))


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


def _backward(case: OpCase, pool: Sequence[tuple[list[Tensor], list[Tensor]]], of_inputs: bool) -> float:
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
    started = time.thread_time()
    torch.autograd.backward(outputs, [gradient] * len(outputs))
    return time.thread_time() - started


def matmul_flops_per_second(dtype: torch.dtype, size: int = 512) -> float:
    """Measure the rate of a square product on one thread: 2·size³ over its time."""
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)

    def run() -> float:
        started = time.thread_time()
        torch.mm(a, b)
        return time.thread_time() - started

    run()
    return 2.0 * size**3 / _usual(run)


def copy_bytes_per_second(size_bytes: int = 32 * 2**20) -> float:
    """Measure the bytes read and written per second by a copy that no cache holds."""
    a = torch.ones(size_bytes // 4)
    b = torch.empty_like(a)

    def run() -> float:
        started = time.thread_time()
        b.copy_(a)
        return time.thread_time() - started

    run()
    return 2.0 * size_bytes / _usual(run)


def compute_overhead_seconds() -> float:
    """Time how long the host takes to start a forward and, apart, a backward of a segment: the mean of the two."""
    x = torch.ones(4, requires_grad=True)
    seed = torch.ones(4)

    def run() -> float:
        started = time.thread_time()
        for _ in range(50):
            y = x * 2.0
            torch.autograd.backward([y], [seed])
        return (time.thread_time() - started) / 100

    run()
    return _usual(run)


def optimizer_rates(steps: int = 4) -> dict[str, tuple[float, float]]:
    """Measure (seconds per tensor, seconds per byte of parameters) of each kind of ``torch.optim`` optimizer."""
    makers: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-3),
        "momentum": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    }
    rates = {}
    for name, make in makers.items():
        seconds = []
        for count, elements in ((32, 16), (8, 2**19)):
            parameters = [torch.nn.Parameter(torch.ones(elements)) for _ in range(count)]
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer = make(parameters)  # type: ignore[arg-type]
            optimizer.step()

            def run(optimizer: torch.optim.Optimizer = optimizer) -> float:
                started = time.thread_time()
                optimizer.step()
                return time.thread_time() - started

            seconds.append(_usual(run) / count)
        rates[name] = (seconds[0], max(0.0, seconds[1] - seconds[0]) / (4 * 2**19))
    return rates
