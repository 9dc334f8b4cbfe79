"""The search for the rank that failed, among ranks that wait for each other.

Every wait has a time limit. The rank whose wait ends badly (the peer's process is gone: at once; the peer
hangs: after the limit) looks up what the others reported in the process group's store, and follows them to
the cause:

    rank 3 waits on rank 2 for <h.9:0@2, rank 2 on rank 1 for <h.3:0@1, rank 1 reports nothing  →  rank 1

Among the ranks of a collective, the rank to find is one that is not in that collective itself.

A rank reports a wait once it lasts for a second (a daemon thread watches, the step itself pays one attribute
write per wait), and an exception of its own at once. The store is a help, not a need: if it died with the
failed rank, the direct peer is named.

A rank that raised before it took part in a call (it cannot read its batch, say) is waited for in vain: the watcher
then ends the wait (``hang_up``), long before the time limit. Ranks count their calls, so that a refusal which all of
them raise and go on from is not taken for that.
"""

from __future__ import annotations

import itertools
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from cost_models.errors import RankFailureError

logger = logging.getLogger("partitioner")

WAIT_SHARE = 0.8
"""Share of the time limit that a single wait may take; the rest is for ending cleanly within it."""


REPORT_SECONDS = 1.0
"""Seconds that a wait lasts before it is reported, at most."""

GATHER_SHARE = 0.1
"""Share of the time limit in which the members of a failed collective are given time to say that they are in it."""

Describe = Callable[[int], tuple[Sequence[int], str]]
"""Function from a wait number to (the ranks that are waited for, text of the instruction)."""


class FailureMonitor:
    """The watch over one rank's waits, which explains those that fail.

    ``name`` sets the executor apart from others that share the store.

    ``waiting`` is the number of the wait that the compute thread is in, or -1. Numbers never repeat.
    """

    def __init__(self, rank: int, store: Any | None, timeout_seconds: float, name: str) -> None:
        self.rank = rank
        self.timeout_seconds = timeout_seconds
        self.wait_seconds = timeout_seconds * WAIT_SHARE
        self.waiting = -1
        self.running = -1
        """Number of the instruction that waits by itself for other ranks: a segment with collectives in it."""
        self.describe: Describe | None = None
        self.hang_up: Callable[[], None] | None = None
        """Function that makes the wait fail that the compute thread is in."""
        self._failed = False
        self._call = 0
        """Number of the collective call that this rank is in, or was in last; alike on all ranks."""
        self._unserved = False
        """True if what this rank raised keeps it from serving the others in this call."""
        self._ending = threading.Lock()
        """Lock held while the watcher ends a wait."""
        self._over = False
        """True once a wait failed: what is reported then stays."""
        self._vain: int | None = None
        """Number of the wait that the watcher ended."""
        # A connection apart: the watching thread must not queue behind other users of the store.
        self._store = None if store is None else dist.PrefixStore(f"partitioner/{name}", _cloned(store))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name=f"partitioner-watch-{rank}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._stop.set()
        self._thread.join(timeout=5.0)

    def explain(
        self, step: int, peers: Sequence[int], instruction: str, error: BaseException
    ) -> RankFailureError:
        """Return the error to raise where waiting on ``peers`` for ``instruction`` failed with ``error``."""
        self._over = True
        with self._ending:  # else the watcher could still be at it when this process ends
            self._report({"peers": list(peers), "instruction": instruction})
        chain, cause = self._follow(peers, instruction)
        culprit = chain[-1]
        reasons = [f"rank {self.rank} waited on rank {chain[0]} for `{instruction}` in step {step}"]
        reasons += [f"rank {a} itself waited on rank {b}" for a, b in itertools.pairwise(chain)]
        if cause:
            reasons.append(f"rank {culprit} reported: {cause}")
        patience = []
        if self._vain is None:
            reasons.append(
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
            )
            patience = [f"raise timeout_seconds (now {self.timeout_seconds:g}) if a step may take longer"]
        return RankFailureError(
            f"rank {culprit} failed or hangs: rank {self.rank} got no answer for `{instruction}`",
            because=reasons,
            suggestions=[
                f"read the log of rank {culprit}",
                *patience,
                "restart all ranks: the process group is unusable after a failure",
            ],
        )

    def report_own(self, error: BaseException) -> None:
        """Tell the others that this rank itself failed."""
        self._failed = True
        self._report({"error": f"{type(error).__name__}: {error}"})
        if self._unserved:
            self._set(f"unserved/{self._call}", self.rank)

    def lost(self) -> None:
        """Note that this rank cannot serve the others in this call any more."""
        self._unserved = True

    @contextmanager
    def needed(self) -> Iterator[None]:
        """Note that what this rank raises inside keeps it from what the others wait for in this call."""
        try:
            yield
        except BaseException:
            self.lost()
            raise

    @contextmanager
    def reported(self, *, call: bool = False) -> Iterator[None]:
        """Tell the others what this rank raises inside: if they wait for it, they name it as the cause.

        All ranks may raise alike (a refusal) and go on, so what was told is taken back when the next call begins.
        ``call``: True for a collective call, which all ranks make alike.
        """
        if call:
            self._call += 1
            self._unserved = False
        if self._failed:
            self._failed = False
            self._report(None)
        try:
            yield
        except RankFailureError:  # another rank's failure, which is told already
            raise
        except BaseException as error:
            self.report_own(error)
            raise

    def _follow(self, peers: Sequence[int], instruction: str) -> tuple[list[int], str | None]:
        """Return the ranks from one of ``peers`` to one that waits on nobody, and what that one reported of itself."""
        chain: list[int] = []
        while True:
            chain.append(self._missing(peers, instruction, chain))
            record = self._get(str(chain[-1]))
            if record is None:
                return chain, None
            if "error" in record:
                return chain, record["error"]
            peers, instruction = record["peers"], record["instruction"]
            if set(peers) <= {*chain, self.rank}:
                waited = ", ".join(map(str, peers))
                return chain, f"waits on rank {waited} for `{instruction}`: a circle"

    def _missing(self, peers: Sequence[int], instruction: str, chain: Sequence[int]) -> int:
        """Blame one of ``peers``: one that failed, else one that waits for something else, or for nothing.

        The members of a collective fail within moments of each other, so each is given some time to report. So is a single
        peer, a second at most: what a third rank did may end the waits of both at once.
        """
        others = [peer for peer in peers if peer not in (*chain, self.rank)]
        patience = self.timeout_seconds * GATHER_SHARE
        deadline = time.monotonic() + (patience if len(others) > 1 else min(patience, REPORT_SECONDS))
        while True:
            records = {peer: self._get(str(peer)) for peer in others}
            failed = [peer for peer, record in records.items() if record and "error" in record]
            elsewhere = [p for p, r in records.items() if r and r.get("instruction") != instruction]
            silent = [peer for peer, record in records.items() if not record]
            if failed or len(silent) < min(2, len(others)) or time.monotonic() > deadline:
                return [*failed, *elsewhere, *silent, *others][0]
            time.sleep(0.02)

    def _watch(self) -> None:
        period = max(0.05, min(0.25, self.timeout_seconds / 20))
        patience = min(REPORT_SECONDS, self.wait_seconds / 2)
        seen, since, reported = -1, 0.0, False
        while not self._stop.wait(period):
            waiting, describe = self.waiting, self.describe
            if waiting != seen:
                seen, since = waiting, time.monotonic()
                if reported:
                    reported = False
                    if not self._over:
                        self._report(None)
            elif waiting >= 0 and describe and time.monotonic() - since > patience:
                if not reported:
                    reported = True
                    peers, instruction = describe(waiting)
                    self._report({"peers": list(peers), "instruction": instruction})
                self._end_if_in_vain(waiting)

    def _end_if_in_vain(self, waiting: int) -> None:
        """End the wait if a rank said that it has no part in this call."""
        if self.hang_up is None or self._vain == waiting or self._get(f"unserved/{self._call}") is None:
            return
        with self._ending:
            if self.waiting == waiting:
                self._vain = waiting
                self.hang_up()

    def _report(self, record: dict[str, Any] | None) -> None:
        self._set(str(self.rank), record)

    def _set(self, key: str, value: Any) -> None:
        if self._store is None:
            return
        try:
            self._store.set(key, json.dumps(value))
        except (RuntimeError, OSError) as error:  # the store's host may be the rank that died
            logger.debug("rank %d cannot reach the store: %s", self.rank, error)

    def _get(self, key: str) -> Any:
        if self._store is None:
            return None
        try:
            return json.loads(self._store.get(key)) if self._store.check([key]) else None
        except (RuntimeError, OSError) as error:
            logger.debug("rank %d cannot reach the store: %s", self.rank, error)
            return None


_clones: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The second connection of each process group's store, for all executors of the group: torch looks up its peer's name
for every new one, which takes seconds where a name server does not answer."""


def _cloned(store: Any) -> Any:
    if store not in _clones:
        try:
            _clones[store] = store.clone()
        except (RuntimeError, NotImplementedError, AttributeError):
            return store
    return _clones[store]
