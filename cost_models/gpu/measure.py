"""Measurements of one device: an op forward and backward, an optimizer's step, the host's overheads, memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from cost_models.calibration_fit import CaseWork
from cost_models.gpu.cases import DeviceCase
from cost_models.gpu.profile import Measured, Part
from cost_models.gpu.timing import ROUNDS, device_seconds, host_seconds, round_seconds, synchronize
from cost_models.op_cases import OpCase

_MOST_GRAPHS = 8
"""Forwards whose graphs are kept for one round of backwards."""
_MOST_GRAPH_BYTES = 2**31
"""The most memory that they may hold, guessed from operands and results."""

Count = Callable[[OpCase], CaseWork]


def measure_case(case: DeviceCase, count: Count, device: torch.device) -> Measured:
    """Time one op. An op that the device does not have (a backend, a type, too little memory) is a record that says so."""
    try:
        with case.setting():
            return _measured(case, count(case.op), device)
    except (RuntimeError, NotImplementedError) as error:  # torch's for whatever it cannot do, memory included
        if device.type == "cuda":
            torch.cuda.empty_cache()
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return _record(case).model_copy(update={"unsupported": reason[:200]})


def _record(case: DeviceCase) -> Measured:
    return Measured(kind=case.op.kind, number=case.number, backend=case.backend, share=case.share)


def _measured(case: DeviceCase, work: CaseWork, device: torch.device) -> Measured:
    operands = [tensor.to(device) for tensor in (*case.op.inputs(), *case.op.weights())]
    with torch.no_grad():
        result = case.op.call(*operands)
        seconds = device_seconds(lambda: case.op.call(*operands), device)
    parts = {"forward": Part(flops=work.forward[0], moved_bytes=work.forward[1], seconds=seconds)}
    trained = [tensor.requires_grad_() for tensor in operands if tensor.is_floating_point()]
    backward = [a + b for a, b in zip(work.backward_input, work.backward_weight, strict=True)]
    if trained and any(backward):
        size = sum(t.numel() * t.itemsize for t in (*operands, result))
        graphs = int(max(1, min(_MOST_GRAPHS, _MOST_GRAPH_BYTES // max(1, size))))
        parts["backward"] = Part(
            flops=backward[0],
            moved_bytes=backward[1],
            seconds=_backward_seconds(case, operands, trained, torch.ones_like(result), graphs, device),
        )
    return _record(case).model_copy(update={"parts": parts})


def _backward_seconds(
    case: DeviceCase,
    operands: Sequence[Tensor],
    trained: Sequence[Tensor],
    gradient: Tensor,
    graphs: int,
    device: torch.device,
) -> float:
    """Time backwards of graphs that were made before: the median over rounds. Gradients are new, not added to others."""
    found = []
    for _ in range(ROUNDS + 1):
        results = [case.op.call(*operands) for _ in range(graphs + 1)]

        def backward(results: list[Tensor] = results) -> None:
            for tensor in trained:
                tensor.grad = None
            torch.autograd.backward([results.pop()], [gradient])

        synchronize(device)
        calls = graphs if device.type == "cuda" else graphs + 1  # a round on a GPU begins with one more call
        found.append(round_seconds(backward, calls, device) / calls)
    return sorted(found[1:])[ROUNDS // 2]


# --------------------------------------------------------------------------------------------------


def measure_overheads(device: torch.device, calls: int = 100) -> Measured:
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
    return Measured(
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
"""The ways in which torch.optim steps; on a GPU ``foreach`` is what it does if nobody says anything."""
_STEPS = ((256, 1024), (16, 2**23))
"""(tensors, elements of each): many small ones, few large ones."""


def measure_optimizer(
    name: str, way: str, device: torch.device, sizes: Sequence[tuple[int, int]] = _STEPS
) -> Measured:
    """Time a step: seconds per tensor of parameters, seconds per byte of them, host and device, whichever takes longer."""
    found = Measured(kind=f"optimizer {name}", number="float32", backend=way)
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
        return found.model_copy(update={"unsupported": str(error).splitlines()[0][:200]})
    per_byte = max(0.0, seconds[1] - seconds[0]) / (4 * sizes[1][1])
    return found.model_copy(
        update={"values": {"seconds_per_tensor": seconds[0], "seconds_per_byte": per_byte}}
    )


def measure_memory(device: torch.device) -> Measured:
    """Read what the context holds beside tensors, and what the allocator makes of small and large requests.

    The context is what is neither free nor reserved by torch, so on a shared card it counts other processes as well.
    """
    if device.type != "cuda":
        return Measured(kind="memory", unsupported="only CUDA devices tell")
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
    return Measured(kind="memory", values=values)
