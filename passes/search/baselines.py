"""The same step without partitioning: on one device, and with plain data parallelism.

Simulated with the same costs as the plan, so the comparison is fair; an expert looks here first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cost_models.cluster import ClusterSpec
from cost_models.compute import optimizer_seconds
from cost_models.conversion import data_parallel_seconds
from cost_models.devices import Device
from cost_models.memory import StateBytes, update_bytes
from cost_models.room import chance_of_not_fitting
from cost_models.units import counted, format_bytes
from passes.costs.backward_peak import backward_peak
from passes.costs.costs import GraphCosts
from passes.graph.graph import OpGraph
from passes.lower.job import Job
from passes.lower.segment import Segmentation
from passes.lower.summarize import state_of_ranks
from passes.search.beside_tensors import least_communicators
from passes.search.certificate import Alternative

MAX_DOUBLINGS = 11
"""At most 1,024 micro-batches."""
ALONE = "one device"


def baselines(graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, job: Job) -> tuple[Alternative, ...]:
    """Cost the step on one device and, where there are several, with a replica on each."""
    alone = one_device(graph, costs, cluster, job)
    return (alone,) if cluster.world_size == 1 else (alone, data_parallel(graph, costs, cluster, job))


def one_device(graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, job: Job) -> Alternative:
    """The whole batch on the device that does it fastest, accumulated over as few micro-batches as memory needs."""
    kinds = {_kind(device): device for device in reversed(cluster.devices)}
    tried = [
        _replica(graph, costs, job, [device], job.batch_size, ALONE, 0.0, 0) for device in kinds.values()
    ]
    return min(tried, key=lambda baseline: (not baseline.feasible, baseline.step_seconds))


def data_parallel(graph: OpGraph, costs: GraphCosts, cluster: ClusterSpec, job: Job) -> Alternative:
    """A replica of the model per device and one all-reduce of all gradients after the last backward.

    Equal shares of the batch: the slowest device paces the step, the smallest must hold a replica.
    """
    world = cluster.world_size
    local_batch = -(-job.batch_size // world)
    seconds = data_parallel_seconds(_state(graph, job, local_batch).gradients, cluster)
    kinds = {_kind(device): device for device in cluster.devices}
    beside = least_communicators(cluster, range(world))
    name = f"data parallel x{world}"
    return _replica(graph, costs, job, list(kinds.values()), local_batch, name, seconds, beside)


def _replica(
    graph: OpGraph,
    costs: GraphCosts,
    job: Job,
    devices: Sequence[Device],
    batch: int,
    strategy: str,
    reduce_seconds: float,
    communicators: int,
) -> Alternative:
    """``batch`` samples on each of ``devices``, in the fewest micro-batches that fit all of them.

    ``communicators``: what those of each process take.
    """
    state = _state(graph, job, batch)
    tensors = sum(
        node_input.kind == "parameter" and node_input.node in graph.needs_grad for node_input in graph.inputs
    )
    every_op = range(len(graph.ops))
    room, memory = (
        min(sizes) for sizes in zip(*((d.room_bytes, d.memory_bytes) for d in devices), strict=True)
    )
    beside = communicators + max(device.context_bytes for device in devices)
    updating = state.total + max(update_bytes(state, device.counted_as, job.optimizer) for device in devices)
    counts = [2**power for power in range(MAX_DOUBLINGS) if 2**power <= batch]
    for microbatches in counts:
        size = -(-batch // microbatches)
        peak = beside + max(updating, _peak_bytes(graph, costs, state, size, microbatches))
        if peak > room and microbatches != counts[-1]:
            continue
        seconds = []
        for device in devices:
            each = costs.segment_seconds(every_op, size, device)
            backward = each.backward_input + each.backward_weight if graph.needs_grad else 0.0
            optimizer = optimizer_seconds(state, device, job.optimizer, tensors)
            seconds.append(microbatches * (each.forward + backward) + optimizer)
        where = "" if strategy == ALONE else " on each device"
        if peak <= room:
            reason = f"fits in {counted(microbatches, 'micro-batch')}"
        elif peak <= memory:
            reason = f"not safe: {format_bytes(peak - room)} too much{where}"
        else:
            reason = f"does not fit: {format_bytes(peak - memory)} short{where}"
        chance = chance_of_not_fitting((peak, device) for device in devices)
        return Alternative(strategy, peak <= room, reason, max(seconds) + reduce_seconds, peak, chance)
    raise AssertionError("a batch has at least one sample")


def _peak_bytes(graph: OpGraph, costs: GraphCosts, state: StateBytes, samples: int, microbatches: int) -> int:
    """Return the most that a replica holds: in the first backward gradients come one by one, in others they are there."""
    saved = costs.held_bytes(range(len(graph.ops)), samples).saved
    backward = backward_peak(graph, costs, range(len(graph.ops)), samples)
    first = state.total - backward.gradient_bytes + saved + backward.first_bytes
    later = state.total + saved + backward.later_bytes
    return max(first, later if microbatches > 1 else 0)


def _kind(device: Device) -> tuple[object, ...]:
    """Equal for devices that do the same work in the same time and memory."""
    return device.speed_alone, device.memory_bytes, device.room_bytes


def _state(graph: OpGraph, job: Job, samples: int) -> StateBytes:
    whole = Segmentation({node.name: 0 for node in graph.ops}, ((0,),), frozenset())
    return state_of_ranks(graph, whole, 1, replace(job, batch_size=samples))[0]
