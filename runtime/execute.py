"""Run a program: a plain loop over one rank's instructions.

    executor = Executor(program, codes, graph, state, batch_spec, device=device)
    loss = executor.train_step(batch, microbatches=8, optimizer=optimizer)

``train_step`` computes the gradients of this batch from zero: loss = Σ over micro-batches of
(samples in it / samples in the batch) · its loss, and steps the optimizer where one is given. On return every
communication of the step is over.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from cost_models.errors import InternalError, UsageError
from runtime.bind import Binder
from runtime.early_sends import EarlySends, early_outputs
from runtime.failure import FailureMonitor
from runtime.groups import create_channels
from runtime.microbatch import batch_size_of, check_cut, cut, microbatch_sizes, symbol_sizes
from runtime.program import BackwardInput, Forward, Program, Recv, SegmentGraph, Send
from runtime.random_state import Seeded
from runtime.release import releases
from runtime.segment_code import BatchSpec, SegmentCode
from runtime.segment_runner import SegmentRunner
from runtime.setting import Setting, Shared

_executors: weakref.WeakKeyDictionary[Any, itertools.count[int]] = weakref.WeakKeyDictionary()
"""Numbers the executors of a process group, alike on all of its ranks."""


_MOST_SHAPES = 32
"""Batch shapes whose handlers are kept; the oldest go first."""


class Optimizer(Protocol):
    """What a step needs of an optimizer."""

    def step(self) -> Any: ...


@dataclass(frozen=True)
class Evaluation:
    """What ``Executor.evaluate`` returns: this rank's share of the results."""

    loss: Tensor | None
    outputs: list[dict[str, Tensor]]
    """Per micro-batch: the model's outputs that this rank computes, by name."""


class Executor:
    """Runs the program of one rank. Collective: every rank of ``group`` builds its own.

    ``codes`` holds at least the segments of this rank, ``state`` the parameters, buffers and constants they
    name, on ``device``. ``programs``: all ranks' programs, where at hand; with them sent buffers are freed
    earlier. ``program.rank`` is the rank in ``group`` (default: all processes). ``seed``: of dropout.
    """

    def __init__(
        self,
        program: Program,
        codes: Mapping[int, SegmentCode],
        graph: SegmentGraph,
        state: Mapping[str, Tensor],
        batch_spec: BatchSpec,
        *,
        device: torch.device | str = "cpu",
        group: Any = None,
        timeout_seconds: float = 30.0,
        programs: Sequence[Program] | None = None,
        seed: int = 0,
        send_early: bool = True,
    ) -> None:
        self.program, self.graph, self.batch_spec = program, graph, batch_spec
        self.device = torch.device(device)
        self._state = state
        self._step = 0
        self._broken: BaseException | None = None
        group = dist.group.WORLD if group is None else group
        if group is not None and dist.get_rank(group) != program.rank:
            raise InternalError(f"rank {dist.get_rank(group)} was given the program of rank {program.rank}")
        store, name = None, ""
        if group is not None:
            store = dist.distributed_c10d._get_default_store()
            number = next(_executors.setdefault(group, itertools.count()))
            name = f"{group.group_name}/executor{number}"
        self._monitor = FailureMonitor(program.rank, store, timeout_seconds, name)
        self._monitor.describe = self._describe
        channels = {} if group is None else create_channels(program, group, timeout_seconds)

        mine = sorted({i.segment for i in program.instructions if isinstance(i, Forward)})
        split = {i.segment for i in program.instructions if isinstance(i, BackwardInput)}
        early = {index: early_outputs(codes[index], program) if send_early else () for index in mine}
        early_sends = {index: EarlySends() for index in mine if early[index]}
        runners = {
            index: SegmentRunner(
                codes[index],
                state,
                split_backward=index in split,
                early=early[index],
                emit=early_sends[index].emit if index in early_sends else None,
            )
            for index in mine
        }
        self._runners = runners
        evaluation = Program(program.rank, tuple(i for i in program.instructions if _is_forward(i)))
        self._training, self._evaluation = (
            Setting(
                program=which,
                graph=graph,
                codes=codes,
                runners=runners,
                channels=channels,
                state=state,
                device=self.device,
                monitor=self._monitor,
                released=releases(which, graph, programs) if training else {},
                seeded=Seeded(seed, self.device),
                early={index: (early[index], sends) for index, sends in early_sends.items()},
                training=training,
            )
            for which, training in ((program, True), (evaluation, False))
        )
        self._parameters = list(
            {
                id(state[i.name]): state[i.name]
                for index in mine
                for i in codes[index].inputs
                if i.kind == "parameter"
            }.values()
        )
        self._bound: dict[object, tuple[Binder, Shared]] = {}

    def train_step(
        self, batch: Mapping[str, Tensor], microbatches: int, optimizer: Optimizer | None = None
    ) -> Tensor | None:
        """Forward, backward and reduction of one batch; then the optimizer's step, where one is given.

        Returns the loss as a 0-dim tensor on ranks that compute it, else None. Gradients are left in
        ``.grad``.
        """
        for parameter in self._parameters:
            parameter.grad = None
        binder, shared = self._prepare(self._training, batch, microbatches)
        shared.optimizer = optimizer
        self._run(binder, shared)
        for runner in self._runners.values():
            runner.write_buffers()
        return _weighted_sum(shared.losses, shared.weights)

    def evaluate(self, batch: Mapping[str, Tensor], microbatches: int) -> Evaluation:
        """The forward half of the program, without gradients; buffers stay as they are."""
        binder, shared = self._prepare(self._evaluation, batch, microbatches)
        shared.outputs = [{} for _ in range(microbatches)]
        with torch.no_grad():
            self._run(binder, shared)
        for runner in self._runners.values():
            runner.discard()
        return Evaluation(_weighted_sum(shared.losses, shared.weights), shared.outputs)

    def close(self) -> None:
        """Stop watching for failures."""
        self._monitor.close()

    def _prepare(
        self, setting: Setting, batch: Mapping[str, Tensor], microbatches: int
    ) -> tuple[Binder, Shared]:
        if self._broken is not None:
            raise UsageError(
                "this executor cannot run another step",
                because=[f"an earlier step failed: {self._broken}"],
                suggestions=["restart all ranks from the last checkpoint"],
            )
        batch_size = batch_size_of(batch, self.batch_spec)
        check_cut(batch_size, microbatches)
        shapes = {name: tuple(batch[name].shape) for name in self.batch_spec.batch_dims}
        key = (setting.training, microbatches, tuple(shapes.items()))
        if key not in self._bound:
            if len(self._bound) >= _MOST_SHAPES:
                self._bound.pop(next(iter(self._bound)))
            self._bound[key] = self._bind(setting, batch_size, microbatches, shapes)
        binder, shared = self._bound[key]
        for name, pieces in shared.pieces.items():
            leaf = batch[name].detach().to(self.device, non_blocking=True)
            pieces[:] = cut(leaf, self.batch_spec.batch_dims[name], microbatches)
        shared.losses = [None] * microbatches
        shared.step = self._step
        self._step += 1
        return binder, shared

    def _bind(
        self,
        setting: Setting,
        batch_size: int,
        microbatches: int,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> tuple[Binder, Shared]:
        asked = {i.microbatch for i in setting.program.instructions if isinstance(i, Forward)}
        if asked and asked != set(range(microbatches)):
            raise UsageError(
                f"the program is made for {len(asked)} micro-batches, not {microbatches}",
                suggestions=[f"call with microbatches={len(asked)}, or plan again"],
            )
        sizes = microbatch_sizes(batch_size, microbatches)
        moved = {i.message.value for i in setting.program.instructions if isinstance(i, Send | Recv)}
        specs = {
            name: s for r in self._runners.values() for name, s in r.code.values.items() if name in moved
        }
        by_size = {}
        for size in set(sizes):
            symbols = symbol_sizes(self.batch_spec, shapes, size)
            by_size[size] = {name: (spec.concrete(symbols), spec.dtype) for name, spec in specs.items()}
        leaves = {name for runner in self._runners.values() for name in runner.leaf_names}
        shared = Shared(
            microbatches=microbatches,
            shapes=[by_size[size] for size in sizes],
            weights=[size / batch_size for size in sizes],
            pieces={name: [] for name in sorted(leaves)},
        )
        return Binder(setting, shared), shared

    def _run(self, binder: Binder, shared: Shared) -> None:
        """The loop. Everything else in this file happens once."""
        self._active = binder
        try:
            for handler in binder.handlers:
                handler()
            binder.finish()
            self._synchronize(binder, shared)
        except BaseException as error:
            self._fail(binder, error)
            raise
        shared.checked = True

    def _synchronize(self, binder: Binder, shared: Shared) -> None:
        """On a GPU: let the device finish, within the time limit."""
        if self.device.type != "cuda":
            return
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        deadline = time.monotonic() + self._monitor.wait_seconds
        while not done.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                pending = [p for p, work in binder.waited if not work.is_completed()]
                self._monitor.waiting = shared.step * len(binder.works) + (pending[0] if pending else 0)
                raise RuntimeError(f"the device did not finish within {self._monitor.wait_seconds:g} s")
            time.sleep(20e-6)
        binder.waited.clear()

    def _fail(self, binder: Binder, error: BaseException) -> None:
        """Free what the step holds; raise who failed if it was not this rank itself."""
        waiting = self._monitor.waiting
        self._broken = error
        binder_works = len(binder.works)
        binder.clear()
        for runner in self._runners.values():
            runner.discard()
        self._monitor.waiting = -1
        if waiting < 0 or not isinstance(error, RuntimeError):
            self._monitor.report_own(error)
            return
        peer, instruction = self._describe(waiting)
        raise self._monitor.explain(waiting // binder_works, peer, instruction, error) from error

    def _describe(self, waiting: int) -> tuple[int, str]:
        instructions = self._active.setting.program.instructions
        instruction = instructions[waiting % len(instructions)]
        if isinstance(instruction, Send | Recv):
            message = instruction.message
            return (message.target if isinstance(instruction, Send) else message.source), str(instruction)
        others = [r for r in getattr(instruction, "ranks", ()) if r != self.program.rank]
        return (others[0] if others else self.program.rank), str(instruction)


def _is_forward(instruction: object) -> bool:
    if isinstance(instruction, Send | Recv):
        return not instruction.message.gradient
    return isinstance(instruction, Forward)


def _weighted_sum(losses: Sequence[Tensor | None], weights: Sequence[float]) -> Tensor | None:
    """Σ weightᵢ · lossᵢ; None on ranks that compute no loss."""
    present = [loss for loss in losses if loss is not None]
    if not present:
        return None
    stacked = torch.stack(present)
    return (stacked * stacked.new_tensor(weights)).sum()
