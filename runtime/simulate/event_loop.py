"""The simulator's event loop: programs as flat operations, one event after the other.

Meaning of the instructions (the executor's and the checker's):
    a compute waits for the messages it is the first on its rank to consume, then occupies the rank
    a send or receive is put on its queue and the rank goes on; a transfer starts when the message is at the head of
        the queue on both ranks, and leaves both queues when its last byte has arrived
    a reduction waits for all of its ranks, then occupies them all; so does a compute that several ranks run together,
        which waits for the messages of them all too

A transfer takes its path's latency, then moves its bytes at the rate its links give it (``fair_share``); so do sums of
gradients, and what computes communicate inside (``flows``). While a rank has a transfer under way, its computes, and those
that others run together with it, take ``contention`` times longer; longer too while their own collectives wait for links.
Sums that start while the last backward runs (``FlatPrograms.early``) are such transfers, one after the other.
The first rank of a group (``leader_of``) keeps the time of what its ranks run together.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from runtime.simulate.fair_share import FairShare
from runtime.simulate.flatten import COMPUTE, RECV, REDUCE, SEND, TOGETHER, FlatPrograms

NOT_YET = -1.0

_COMPUTE_END, _BYTES_START, _BYTES_END, _GO_ON, _SUM_DUE = range(5)


class EventLoop:
    """The times of everything that happened, in seconds; ``NOT_YET`` where something never ran."""

    def __init__(self, flat: FlatPrograms, leader_of: Sequence[int]) -> None:
        self.flat, self._leader_of = flat, leader_of
        count, nodes = len(flat.message_bytes), len(flat.node_places)
        ranks = range(len(flat.operations))
        self.start = [NOT_YET] * nodes
        self.end = [NOT_YET] * nodes
        self.posted_send = [NOT_YET] * count
        self.posted_receive = [NOT_YET] * count
        self.transfer_start = [NOT_YET] * count
        self.transfer_end = [NOT_YET] * count
        self.reduction_start = [NOT_YET] * len(flat.reduction_ranks)
        self.reduction_end = [NOT_YET] * len(flat.reduction_ranks)
        self.step_start = [NOT_YET for _ in ranks]
        self.step_end = [NOT_YET for _ in ranks]
        self.finish_seconds = 0.0

        self._awaited = [0] * nodes
        for consumer in flat.message_consumers:
            if consumer >= 0:
                self._awaited[consumer] += 1
        self._next = [0 for _ in ranks]
        self._asleep_at = [-1 for _ in ranks]
        self._running = [-1 for _ in ranks]
        self._heads = [0] * count
        self._fifo: list[deque[int]] = [deque() for _ in range(len(flat.queues))]
        self._queues_of: list[list[int]] = [[] for _ in range(count)]
        self._first_sum = count
        self._first_load = count + len(flat.reduction_ranks)
        """Numbers of flows: messages, sums of gradients (by reduction), loads."""
        self._version = [0] * self._first_load
        self._due: dict[int, deque[tuple[float, list[int]]]] = {}
        """Sums that start while the compute of a rank runs: seconds of it that are left then, and their numbers."""
        self._ready: dict[int, deque[list[int]]] = {}
        """Sums of a rank whose gradients are there: they run one after the other."""
        self._under_way: dict[int, int] = {}
        """Number of early sums of a rank that run."""
        self._summing_for: dict[int, int] = {}
        """The rank whose compute each of these belongs to."""
        self._waiting: dict[int, list[int]] = {}
        """Ranks that wait for the end of an early sum."""
        self._arrived = [0] * len(flat.reduction_ranks)
        self._shared_seconds = [0.0] * len(flat.reduction_ranks)
        """Seconds of each compute that several ranks run together."""
        self._share = FairShare(flat.links)
        self._transfers_at = [0 for _ in ranks]
        self._loads: list[tuple[int, ...]] = [() for _ in ranks]
        self._slowdown = [1.0 for _ in ranks]
        self._work_left = [0.0 for _ in ranks]
        self._since = [0.0 for _ in ranks]
        self._compute_version = [0 for _ in ranks]
        self._end_due = [0.0 for _ in ranks]
        """The moment of the event that ends each running compute; it ends later if it was slowed down since."""
        self._slowed = [False for _ in ranks]
        """True where the running compute ends after ``_end_due``, whose event then times the rest; never before it."""
        self._events: list[tuple[float, int, int, int, int]] = []
        self._count = 0

    def run(self) -> EventLoop:
        """Run until nothing happens any more: every rank is at its end, or some wait forever (``unfinished``)."""
        for rank in range(len(self.flat.operations)):
            self._advance(rank, 0.0)
        handle = {
            _COMPUTE_END: self._compute_ends,
            _BYTES_START: self._bytes_start,
            _BYTES_END: self._bytes_end,
            _GO_ON: self._goes_on,
            _SUM_DUE: self._sum_is_due,
        }
        events = self._events
        now = 0.0
        while events:
            now, _, code, item, version = heappop(events)
            handle[code](item, version, now)
        return self

    def _at(self, seconds: float, code: int, item: int, version: int = 0) -> None:
        self._count += 1
        heappush(self._events, (seconds, self._count, code, item, version))

    # Ranks

    def _advance(self, rank: int, now: float) -> None:
        """Run the rank's program until it has to wait."""
        operations = self.flat.operations[rank]
        index, length = self._next[rank], len(operations)
        while index < length:
            code, target, seconds, queue = operations[index]
            if code == COMPUTE:
                if self._awaited[target]:
                    self._asleep_at[rank] = target
                    break
                self._begin_compute(rank, target, seconds, now)
                index += 1
                break
            if code in (SEND, RECV):
                posted = self.posted_send if code == SEND else self.posted_receive
                posted[target] = now
                index += 1
                self._queues_of[target].append(queue)
                fifo = self._fifo[queue]
                fifo.append(target)
                if len(fifo) == 1:
                    self._heads[target] += 1
                    if self._heads[target] == 2:
                        self._start_transfer(target, now)
                if seconds:
                    self._at(now + seconds, _GO_ON, rank)
                    break
            elif code == REDUCE and target in self.flat.early_sums:
                if self.reduction_end[target] == NOT_YET:
                    self._waiting.setdefault(target, []).append(rank)
                    break
                index += 1
            elif code in (REDUCE, TOGETHER):
                self._shared_seconds[target] = seconds
                self._comes(target, now)
                break
            else:
                index += 1
                self.step_start[rank], self.step_end[rank] = now, now + seconds
                self._at(now + seconds, _GO_ON, rank)
                break
        self._next[rank] = index

    def _goes_on(self, rank: int, _: int, now: float) -> None:
        self.finish_seconds = max(self.finish_seconds, now)
        self._advance(rank, now)

    # Computes

    def _begin_compute(self, rank: int, node: int, seconds: float, now: float) -> None:
        self.start[node], self._running[rank] = now, node
        self._loads[rank] = self.flat.loads_of_rows[node // len(self.flat.scale)]
        early = self.flat.early.get(node, ())
        self._due[rank] = deque(((1.0 - share) * seconds, numbers) for share, numbers in early)
        self._time_compute(rank, seconds, now)
        for place in self._loads[rank]:
            load = self.flat.loads[place]
            flow = self._first_load + place
            self._reschedule(self._share.join(flow, load.path, math.inf, now, load.weight), now)

    def _time_compute(self, rank: int, seconds: float, now: float) -> None:
        """Let the running compute of the rank, which has ``seconds`` left undisturbed, end at the speed it has now."""
        self._work_left[rank], self._since[rank] = seconds, now
        self._slowdown[rank] = self._slowdown_now(rank)
        self._compute_version[rank] += 1
        self._end_due[rank], self._slowed[rank] = now + seconds * self._slowdown[rank], False
        self._at(self._end_due[rank], _COMPUTE_END, rank, self._compute_version[rank])
        self._time_sums(rank, now)

    def _slowdown_now(self, rank: int) -> float:
        slowdown = self.flat.contention if self._transfers_at[rank] > 0 else 1.0
        for place in self._loads[rank]:
            flow = self._first_load + place
            if self._share.moves(flow):
                slowdown += max(0.0, self.flat.loads[place].asked / self._share.rate(flow) - 1.0)
        return slowdown

    def _retime(self, rank: int, now: float) -> None:
        """Time the running compute of the rank again, if it runs and its speed has changed.

        A compute that now ends later keeps its event; when that fires, the rest is timed. Transfers are short, and timing
        the compute again at both ends of each would push two events.
        """
        if self._running[rank] < 0:
            return
        slowdown = self._slowdown_now(rank)
        if slowdown == self._slowdown[rank]:
            return
        left = self._left(rank, now)
        if self._due[rank] or now + left * slowdown < self._end_due[rank]:
            self._time_compute(rank, left, now)
            return
        self._work_left[rank], self._since[rank] = left, now
        self._slowdown[rank], self._slowed[rank] = slowdown, True

    def _left(self, rank: int, now: float) -> float:
        """Return the seconds that the running compute of the rank has left, undisturbed."""
        return max(0.0, self._work_left[rank] - (now - self._since[rank]) / self._slowdown[rank])

    def _compute_ends(self, rank: int, version: int, now: float) -> None:
        if version != self._compute_version[rank]:
            return  # the compute was timed again since: another event ends it
        if self._slowed[rank]:
            self._time_compute(rank, self._left(rank, now), now)
            return
        node, self._running[rank] = self._running[rank], -1
        self.end[node] = now
        self._let_sums_start(rank, now)
        for place in self._loads[rank]:
            self._reschedule(self._share.leave(self._first_load + place, now), now)
        if node in self.flat.together:
            self._reduction_ends(self.flat.together[node], now)
            return
        self.finish_seconds = max(self.finish_seconds, now)
        self._advance(rank, now)

    def _transfers_change(self, rank: int, change: int, now: float) -> None:
        """Time the running compute of the rank's group again when its first transfer starts or its last one ends."""
        rank = self._leader_of[rank]
        before = self._transfers_at[rank]
        self._transfers_at[rank] = before + change
        if before == 0 or before + change == 0:
            self._retime(rank, now)

    # Sums beside a compute

    def _time_sums(self, rank: int, now: float) -> None:
        """Let the next sums that start while the rank's compute runs be due at the speed that it has now."""
        if self._due[rank]:
            ahead = max(0.0, self._left(rank, now) - self._due[rank][0][0])
            self._at(now + ahead * self._slowdown[rank], _SUM_DUE, rank, self._compute_version[rank])

    def _sum_is_due(self, rank: int, version: int, now: float) -> None:
        if version != self._compute_version[rank] or not self._due[rank]:
            return  # the compute goes at another speed since, and another event tells; or it has ended
        self._ready.setdefault(rank, deque()).append(self._due[rank].popleft()[1])
        self._time_sums(rank, now)
        self._start_sums(rank, now)

    def _let_sums_start(self, rank: int, now: float) -> None:
        """Let all sums of the rank's compute start, since it has ended."""
        if self._due[rank]:
            self._ready.setdefault(rank, deque()).extend(numbers for _, numbers in self._due[rank])
            self._due[rank].clear()
            self._start_sums(rank, now)

    def _start_sums(self, rank: int, now: float) -> None:
        """Start the rank's next early sums, if none runs."""
        if self._under_way.get(rank) or not self._ready.get(rank):
            return
        numbers = self._ready[rank].popleft()
        self._under_way[rank] = len(numbers)
        self._transfers_change(rank, 1, now)
        for number in numbers:
            self._summing_for[number], self.reduction_start[number] = rank, now
            path, size_bytes, weight = self.flat.sum_flows[number]
            self._reschedule(self._share.join(self._first_sum + number, path, size_bytes, now, weight), now)

    def _early_sum_ends(self, number: int, now: float) -> None:
        rank = self._summing_for[number]
        self._under_way[rank] -= 1
        if not self._under_way[rank]:
            self._transfers_change(rank, -1, now)
            self._start_sums(rank, now)

    # Transfers

    def _start_transfer(self, message: int, now: float) -> None:
        self.transfer_start[message] = now
        if self.flat.contention != 1.0:
            for rank in self.flat.message_ranks[message]:
                self._transfers_change(rank, 1, now)
        latency = self.flat.message_paths[message].latency_seconds
        self._at(now + latency, _BYTES_START, message)

    def _bytes_start(self, message: int, _: int, now: float) -> None:
        flat = self.flat
        size_bytes, weight = flat.message_bytes[message], flat.message_weights[message]
        self._reschedule(self._share.join(message, flat.message_paths[message], size_bytes, now, weight), now)

    def _reschedule(self, ends: list[tuple[int, float]], now: float) -> None:
        for flow, end in ends:
            if flow >= self._first_load:
                self._retime(self.flat.loads[flow - self._first_load].rank, now)
                continue
            self._version[flow] += 1
            self._at(end, _BYTES_END, flow, self._version[flow])

    def _bytes_end(self, flow: int, version: int, now: float) -> None:
        if version != self._version[flow]:
            return  # its rate has changed since: another event ends it
        if flow < self._first_sum:
            self._transfer_ends(flow, now)
            return
        self._reschedule(self._share.leave(flow, now), now)
        self._reduction_ends(flow - self._first_sum, now)

    def _transfer_ends(self, message: int, now: float) -> None:
        flat = self.flat
        self.transfer_end[message] = now
        self.finish_seconds = max(self.finish_seconds, now)
        self._reschedule(self._share.leave(message, now), now)
        if flat.contention != 1.0:
            for rank in flat.message_ranks[message]:
                self._transfers_change(rank, -1, now)
        for queue in self._queues_of[message]:
            fifo = self._fifo[queue]
            fifo.popleft()
            if fifo:
                head = fifo[0]
                self._heads[head] += 1
                if self._heads[head] == 2:
                    self._start_transfer(head, now)
        consumer = flat.message_consumers[message]
        if consumer in flat.together:
            self._comes(flat.together[consumer], now)
        elif consumer >= 0:
            self._awaited[consumer] -= 1
            target = flat.message_ranks[message][1]
            if self._awaited[consumer] == 0 and self._asleep_at[target] == consumer:
                self._asleep_at[target] = -1
                self._advance(target, now)

    # Collectives, computes of several ranks, and the end

    def _comes(self, reduction: int, now: float) -> None:
        """Count a rank, or a message, that a reduction waits for; the last one starts it."""
        self._arrived[reduction] += 1
        if self._arrived[reduction] < self.flat.comers[reduction]:
            return
        self.reduction_start[reduction] = now
        node = self.flat.together_nodes.get(reduction)
        if node is None:
            path, size_bytes, weight = self.flat.sum_flows[reduction]
            self._reschedule(
                self._share.join(self._first_sum + reduction, path, size_bytes, now, weight), now
            )
            return
        leader = self._leader_of[self.flat.reduction_ranks[reduction][0]]
        self._begin_compute(leader, node, self._shared_seconds[reduction], now)

    def _reduction_ends(self, reduction: int, now: float) -> None:
        self.reduction_end[reduction] = now
        self.finish_seconds = max(self.finish_seconds, now)
        ranks: Sequence[int] = self.flat.reduction_ranks[reduction]
        if reduction in self.flat.early_sums:
            self._early_sum_ends(reduction, now)
            ranks = self._waiting.get(reduction, ())
        for rank in ranks:
            self._next[rank] += 1
            self._advance(rank, now)

    def unfinished(self) -> list[tuple[int, int]]:
        """List (rank, index of the instruction that it stands before) for every rank that did not reach its end."""
        return [
            (rank, self._next[rank])
            for rank, operations in enumerate(self.flat.operations)
            if self._next[rank] < len(operations) or self._running[rank] >= 0
        ]
