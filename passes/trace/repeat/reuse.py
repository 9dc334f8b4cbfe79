"""Equal blocks of a model, traced once: in an export, the run of every further equal block is written from a record.

    layer 0    runs: which functions are called is noted
    layer 1    runs, recorded: nodes, what they read, which attributes the code asked for
    layer 2…   sees what layer 1 saw, but for attributes that its code did not ask for: written from the record

What a run sees is compared every time (``sight``), so unlike layers run, and layers of two kinds in turn are two records.
Whatever cannot be compared, or is more than operations on tensors, is traced as ever.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import _ModuleStackTracer

from passes.graph.nodes import storage_key
from passes.trace.repeat.record import NotRepeatableError, Recorded, record
from passes.trace.repeat.replay import replay, untraced
from passes.trace.repeat.sight import (
    Codes,
    Place,
    Sight,
    globals_seen,
    modes_now,
    sight,
    watch_code,
    watch_reads,
    watch_rest,
)
from passes.trace.repeat.values import Description, UnknownError

logger = logging.getLogger("partitioner")

FEWEST_BLOCKS = 3
"""Blocks of one class in a container: the first two run anyway."""
MOST_TRIES = 4
"""Runs of one class of blocks in one container that led to no record, before no more are compared."""


@contextlib.contextmanager
def _looking() -> Iterator[None]:
    """Look at values outside of the trace; whatever the user's own objects raise meanwhile is an UnknownError."""
    try:
        with untraced():
            yield
    except UnknownError:
        raise
    except Exception as error:
        raise UnknownError(repr(error)) from error


@dataclass(frozen=True)
class _Call:
    """A call of a block."""

    tracer: Any
    block: nn.Module
    path: str
    run: Callable[[], Any]
    args: Any
    kwargs: Any

    def look(self) -> Sight:
        """Look at what the block would see."""
        modes = modes_now()
        with _looking():
            return sight(self.block, self.args, self.kwargs, modes)

    def globals(self, codes: Codes) -> Description:
        """Look at the globals of some functions."""
        with _looking():
            return globals_seen(self.block, codes)


@dataclass(frozen=True)
class _RecordedRun:
    """A recorded run."""

    seen: Sight
    codes: Codes
    """The functions that it called, with their globals."""
    globals: Description
    """The values of these globals."""
    reads: frozenset[Place]
    """The attributes that it read."""
    run: Recorded

    def serves(self, call: _Call, seen: Sight) -> bool:
        """Tell whether the call would do what this run did."""
        try:
            return self.seen.as_seen_by(seen, self.reads) and self.globals == call.globals(self.codes)
        except UnknownError:
            return False


@dataclass
class _BlockClass:
    """Runs of blocks of one class in one container."""

    ran: list[tuple[Sight, Codes]] = field(default_factory=list)
    """Runs that were not recorded: what they saw, and the functions that they called."""
    records: list[_RecordedRun] = field(default_factory=list)
    failures: int = 0
    """Runs that could not be compared or recorded."""


class Reuse:
    """The blocks of one export, and the runs of them."""

    def __init__(self, model: nn.Module, mode: FakeTensorMode) -> None:
        self._mode = mode
        self._blocks = {id(vars(block)): (block, container) for container, block in _blocks(model)}
        self._kinds: dict[Any, _BlockClass] = {}
        self._busy = False
        self.written: Counter[str] = Counter()
        """The number of blocks that were written from a record, by class."""

    def call(
        self,
        original: Callable[..., Any],
        tracer: Any,
        module: nn.Module,
        forward: Any,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Call a module, or write what the call would do."""

        def run() -> Any:
            return original(tracer, module, forward, args, kwargs)

        known = self._blocks.get(id(object.__getattribute__(module, "__dict__")))
        if known is None or self._busy:
            return run()
        block, container = known
        kind = self._kinds.setdefault((type(block), id(container)), _BlockClass())
        path = tracer.path_of_module(module)
        again = any(name == path or name.startswith(f"{path}.") for name in tracer.num_calls)
        if (
            kind.failures + len(kind.ran) - len(kind.records) >= MOST_TRIES
            or again
            or sys.getprofile() is not None
        ):
            return run()
        call = _Call(tracer, block, path, run, args, kwargs)
        try:
            seen = call.look()
        except UnknownError as reason:
            return self._refused(kind, call, reason)
        self._busy = True
        try:
            return self._run(kind, call, seen)
        finally:
            self._busy = False

    def _refused(self, kind: _BlockClass, call: _Call, reason: Exception) -> Any:
        kind.failures += 1
        logger.debug("%s runs every time: %s", call.path, reason)
        return call.run()

    def _run(self, kind: _BlockClass, call: _Call, seen: Sight) -> Any:
        for known in kind.records:
            if known.serves(call, seen):
                with contextlib.suppress(NotRepeatableError):
                    result = replay(call.tracer, known.run, call.path, seen, self._mode)
                    self.written[type(call.block).__name__] += 1
                    return result
        for before, codes in kind.ran:
            if before.alike(seen):
                return self._record(kind, call, seen, codes)
        with watch_code() as called:
            result = call.run()
        kind.ran.append((seen, called))
        return result

    def _record(self, kind: _BlockClass, call: _Call, seen: Sight, codes: Codes) -> Any:
        """Run a block as one before it has run, recorded."""
        try:
            before = call.globals(codes)
        except UnknownError as reason:
            return self._refused(kind, call, reason)
        called: set[types.CodeType] = set()

        def run() -> Any:
            with watch_code() as noted:  # not around what is asked of the run afterwards
                result = call.run()
            called.update(noted)
            return result

        with watch_reads(call.block) as reads, watch_rest() as done:
            result, recorded = record(call.tracer, call.path, seen, self._mode, run)
        try:
            if isinstance(recorded, NotRepeatableError):
                raise recorded
            if done:
                raise NotRepeatableError(f"it {done[0]}")
            if more := called - codes.keys():
                raise NotRepeatableError(
                    f"it calls {next(iter(more)).co_qualname}, which the block before did not"
                )
            after = call.look()
            if (after.call, after.attributes, call.globals(codes)) != (seen.call, seen.attributes, before):
                raise NotRepeatableError("it changes what it sees")
        except (NotRepeatableError, UnknownError) as reason:
            kind.failures += 1
            logger.debug("%s runs every time: %s", call.path, reason)
        else:
            kind.records.append(_RecordedRun(seen, codes, before, frozenset(reads), recorded))
        return result


def _blocks(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield (container, module) where it holds several of one class, each with parameters and children of its own."""
    places = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    memory = Counter(storage_key(tensor) for module in model.modules() for tensor in _state(module))
    for container in model.modules():
        if not isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        classes = Counter(type(block) for block in container.children())
        for block in container.children():
            if (
                classes[type(block)] >= FEWEST_BLOCKS
                and all(places[id(module)] == 1 for module in block.modules())
                and all(memory[storage_key(t)] == 1 for module in block.modules() for t in _state(module))
            ):
                yield container, block


def _state(module: nn.Module) -> list[Tensor]:
    tables = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in tables if tensor is not None]


@contextlib.contextmanager
def reuse_blocks(model: nn.Module, mode: FakeTensorMode) -> Iterator[Reuse]:
    """Write further runs of equal blocks from the record of one, in an export under ``mode``."""
    reuse = Reuse(model, mode)
    original = _ModuleStackTracer.call_module

    def call_module(tracer: Any, module: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        return reuse.call(original, tracer, module, forward, args, kwargs)

    with mock.patch.object(_ModuleStackTracer, "call_module", call_module):
        yield reuse
    for name, number in reuse.written.items():
        logger.debug("%d runs of %s were written from a record", number, name)
