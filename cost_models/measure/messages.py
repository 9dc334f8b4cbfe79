"""Times of messages between two local processes: latency, bandwidth, the host's share, and what they do to computing.

Called by ranks 0 and 1 of an initialized Gloo group, with their own group ``pair``; others wait at the next barrier.
Messages go as the executor sends them: asynchronous sends and receives on both sides, then a wait.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

_SIZES_BYTES = (1024, 64 * 1024, 512 * 1024, 4 * 2**20)
_ROUNDS, _MESSAGES, _PRODUCTS_BETWEEN = 41, 16, 6
"""Products of 192 x 192 between messages: about a millisecond, so that each finds both ranks computing."""
_SMALL_BYTES = 64 * 1024
"""The size of messages whose overheads are measured: a micro-batch's activations of a small model."""
_BESIDE_BYTES, _BESIDE, _BESIDE_ROUNDS = 512 * 1024, 32, 21
"""Messages that are sent beside computing, their number, and how often that is repeated: computing itself varies by 2%."""
_BESIDE_SHARE = 0.2
"""The part of the computing that they would take alone: they must end before it does, however much it slows them."""
_MOST_CONTENTION = 4.0
_ROUND_TRIPS = 40
_TURNS = 5
"""The least of so many medians counts: another program takes a core for longer than one of them takes."""


@dataclass(frozen=True)
class MessageSeconds:
    """``one_way``: (bytes, seconds) of a message. Overheads: host seconds to start one."""

    one_way: tuple[tuple[int, float], ...]
    send_seconds: float
    receive_seconds: float
    contention: float
    """The slowdown of computing by messages, as in ``HostSpec``."""


def measure_messages(rank: int, pair: dist.ProcessGroup) -> MessageSeconds:
    """Measure messages between the two ranks of ``pair``; what rank 0 returns counts."""
    turns = [[_one_way_seconds(rank, pair, size) for size in _SIZES_BYTES] for _ in range(_TURNS)]
    one_way = tuple(zip(_SIZES_BYTES, map(min, zip(*turns, strict=True)), strict=True))
    contention = _contention(rank, pair, one_way)
    latency, bandwidth = fit_latency(one_way)
    send, receive = _overheads(rank, pair, (1 - 1 / contention) * (latency + _SMALL_BYTES / bandwidth))
    return MessageSeconds(one_way, send, receive, contention)


def fit_latency(one_way: tuple[tuple[int, float], ...]) -> tuple[float, float]:
    """Fit seconds = latency + bytes / bandwidth; return (latency in seconds, bytes per second).

    The latency is the smallest message's time; the bandwidth what the largest one leaves: of others it is a small
    difference of times.
    """
    latency = max(1e-7, one_way[0][1])
    size, seconds = one_way[-1]
    return latency, size / max(1e-7, seconds - latency)


def _one_way_seconds(rank: int, pair: dist.ProcessGroup, size_bytes: int) -> float:
    """Time a message from its sending until the other rank goes on: half of the median round trip. Both ranks get it.

    As in a pipeline: the sender has just computed the tensor, and the receiver has posted its receive and waits. Ranks
    compute in turns, and what both took for it is not counted.
    """
    turns = [torch.zeros(2, dtype=torch.float64) for _ in range(_ROUND_TRIPS)]
    for turn in turns:
        dist.barrier(group=pair)
        coming = torch.empty(size_bytes // 4)
        receive = dist.irecv(coming, 1 - rank)
        assert receive is not None
        started = time.perf_counter()
        if rank == 1:
            receive.wait()
        before = time.perf_counter()
        _products_seconds(_PRODUCTS_BETWEEN)
        tensor = torch.ones(size_bytes // 4)
        turn[1] = time.perf_counter() - before
        send = dist.isend(tensor, 1 - rank)
        assert send is not None
        if rank == 0:
            receive.wait()
        turn[0] = time.perf_counter() - started
        send.wait()
    ours = torch.stack(turns)
    computing = ours[:, 1].clone()
    dist.all_reduce(computing, group=pair)
    round_trip = (ours[:, 0] - computing).median()  # on rank 0: rank 1 does not see the whole of it
    dist.broadcast(round_trip, 0, group=pair)
    return float(round_trip) / 2


def _overheads(rank: int, pair: dist.ProcessGroup, charged_seconds: float) -> tuple[float, float]:
    """Measure what a message takes from the computing of its sender and of its receiver, as pipelines send it.

    The receive is posted before its message is sent, and both ranks compute before and after. Gloo then writes the message
    in the thread that sends it, which a message that nobody waits for yet does not show. ``charged_seconds`` of it are
    not counted: what the link's contention already says. Of alternating runs the median.
    """
    added = []
    for _ in range(_ROUNDS):
        dist.barrier(group=pair)
        quiet = sum(_products_seconds(_PRODUCTS_BETWEEN) for _ in range(_MESSAGES))
        buffers = [torch.ones(_SMALL_BYTES // 4) for _ in range(_MESSAGES)]
        works = [dist.irecv(buffers[0], 0)] if rank == 1 else []
        dist.barrier(group=pair)
        started = time.perf_counter()
        for number in range(_MESSAGES):
            if rank == 1 and number + 1 < _MESSAGES:
                works.append(dist.irecv(buffers[number + 1], 0))
            _products_seconds(_PRODUCTS_BETWEEN)
            if rank == 0:
                works.append(dist.isend(buffers[number], 1))
        added.append((time.perf_counter() - started - quiet) / _MESSAGES)
        for work in works:
            assert work is not None
            work.wait()
    spent = torch.zeros(2, dtype=torch.float64)
    spent[rank] = max(0.0, statistics.median(added) - charged_seconds)
    dist.all_reduce(spent, group=pair)
    return float(spent[0]), float(spent[1])


def _contention(rank: int, pair: dist.ProcessGroup, one_way: tuple[tuple[int, float], ...]) -> float:
    """Measure how much slower a rank computes while a message of 512 KB is on its way, as long as its link says.

    Both ranks compute, as in a pipeline, and the transfers are the background threads' work. Computing that takes several
    times as long as all messages loses e seconds by each, whenever it passes, so it goes at 1 - e / alone meanwhile. Of
    alternating runs the median, of both ranks the mean.
    """
    latency, bandwidth = fit_latency(one_way)
    agreed_alone = torch.tensor(latency + _BESIDE_BYTES / bandwidth, dtype=torch.float64)
    dist.all_reduce(agreed_alone, dist.ReduceOp.MAX, group=pair)
    alone_seconds = float(agreed_alone)
    products = max(1, round(_BESIDE * alone_seconds / _BESIDE_SHARE / _products_seconds(64) * 64))
    agreed = torch.tensor(products)
    dist.all_reduce(agreed, dist.ReduceOp.MAX, group=pair)
    products = int(agreed)
    lost = []
    for _ in range(_BESIDE_ROUNDS):
        dist.barrier(group=pair)
        quiet = _products_seconds(products)
        dist.barrier(group=pair)
        buffers = [torch.ones(_BESIDE_BYTES // 4) for _ in range(_BESIDE)]
        works = [dist.isend(b, 1) if rank == 0 else dist.irecv(b, 0) for b in buffers]
        lost.append((_products_seconds(products) - quiet) / _BESIDE)
        for work in works:
            assert work is not None
            work.wait()
    mean = torch.tensor(statistics.median(lost) / 2)
    dist.all_reduce(mean, group=pair)
    share = min(max(0.0, float(mean) / alone_seconds), 1 - 1 / _MOST_CONTENTION)
    return 1 / (1 - share)


def _products_seconds(count: int) -> float:
    a = torch.ones(192, 192)
    started = time.perf_counter()
    for _ in range(count):
        a.mm(a)
    return time.perf_counter() - started
