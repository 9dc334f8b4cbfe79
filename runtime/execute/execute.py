"""Run a program: a plain loop over one rank's instructions.

    executor = Executor(RankProgram(program, codes, graph, state, batch_spec), device=device)
    loss = executor.train_step(batch, microbatches=8)
    optimizer.step()

``train_step`` computes the gradients of this batch from zero: loss = Σ over micro-batches of weight · its loss (the
weight is samples in it / samples in the batch, if none is given). On return every communication of the step is over.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cost_models.errors import InternalError, UsageError
from cost_models.host import keep_freed_memory
from runtime.execute.bind import Binder
from runtime.execute.context import RankProgram, Shared, StepSums, Surroundings
from runtime.execute.loaded import Loaded, MakeBinder
from runtime.mesh.sharding import block_of
from runtime.ops.random import Seeded
from runtime.program.program import Recv, Send
from runtime.ranks.collective import Collectives, Waited
from runtime.ranks.failure import FailureMonitor
from runtime.ranks.groups import hang_up
from runtime.ranks.network_threads import let_compute_go_first
from runtime.segment.code import BatchSpec
from runtime.segment.compiled import CompileOptions
from runtime.segment.microbatch import Microbatches, batch_size_of
from runtime.segment.runner import warm_up
from runtime.state.rank_state import RankState
from runtime.state.sharded_owners import ShardedOwners

_executors: weakref.WeakKeyDictionary[Any, itertools.count[int]] = weakref.WeakKeyDictionary()
"""Counters that number the executors of each process group, alike on all of its ranks."""


_RUN = 1 << 32
"""Count of the wait numbers that one run of a program takes; the last of them is for collectives beside it."""


class Executor:
    """The executor of one rank's program. Collective: every rank of ``group`` builds its own.

    group        the ranks (default: all processes)
    seed         seed of dropout
    compile      options of ``torch.compile`` for the segments; None runs them as they are
    """

    def __init__(
        self,
        own: RankProgram,
        *,
        device: torch.device | str = "cpu",
        group: Any = None,
        timeout_seconds: float = 30.0,
        seed: int = 0,
        send_early: bool = True,
        compile: CompileOptions | None = None,
    ) -> None:
        self.device, self.timeout_seconds = torch.device(device), timeout_seconds
        if self.device.type == "cpu":
            keep_freed_memory()
        self.seed = seed
        self.step = 0
        """Number of training steps so far. Dropout depends on it, so a resumed run sets it."""
        self._runs = itertools.count()
        self._broken: BaseException | None = None
        self._active: Binder | None = None
        program = own.program
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
        if group is not None:
            self._monitor.hang_up = lambda: hang_up(group)
        self._waited: Waited = []
        self.collectives = Collectives(
            group, self._monitor, self.device, self._waited, lambda: self._next_run() + _RUN - 1, self._fail
        )
        self._surroundings = Surroundings(
            self.device,
            group,
            self._monitor,
            self._waited,
            Seeded(seed, self.device),
            timeout_seconds,
            compile,
        )
        self._training = Loaded(self._surroundings, own, send_early=send_early)
        self._loaded = [self._training]
        let_compute_go_first()
        self.program, self.graph, self.batch_spec = program, own.graph, own.batch_spec
        self.microbatches = self._training.microbatches
        """Number that the given program is made for; 0 on a rank that computes nothing."""
        self.leaf_names = self._training.leaf_names
        """Leaves of a batch that this rank cannot do without."""

    def sharded_owners(self, state: RankState) -> ShardedOwners:
        """Make the keeper of leaves and owners of ``state`` where owners are parts (``shardings``)."""
        return ShardedOwners(state, self._training.sums, self._training.axis, self.collectives)

    def warm_up(self, shapes: Mapping[str, tuple[int, ...]], sizes: Iterable[int]) -> None:
        """Compile this rank's segments for micro-batches of each of ``sizes`` samples, of leaves with ``shapes``."""
        own = self._training.own
        warm_up(self._training.runners.values(), own.state, own.batch_spec, shapes, sizes, self.device)

    def load(self, own: RankProgram) -> Loaded:
        """Load another graph to ``evaluate``, of any segments. Collective. Tensors shared with training are not copied.

        It is not compiled: that takes minutes, and ranks would wait for each other meanwhile.
        """
        loaded = Loaded(replace(self._surroundings, compile=None), own)
        self._loaded.append(loaded)
        return loaded

    def unload(self, loaded: Loaded) -> None:
        """Forget what ``load`` made."""
        self._loaded.remove(loaded)

    def train_step(
        self,
        batch: Mapping[str, Tensor],
        microbatches: int,
        *,
        weights: Sequence[float] | None = None,
    ) -> Tensor | None:
        """Run forward, backward and reduction of one batch.

        Returns the loss as a 0-dim tensor on ranks that compute it, else None. Gradients are left in
        ``.grad``. ``weights``: factor of each micro-batch's loss (default: its share of the samples).
        """
        cuts = Microbatches.of(self.batch_size_of(batch), microbatches, self.batch_spec.multiple)
        return self.run_step(batch, cuts, weights=weights).loss

    def run_step(
        self,
        batch: Mapping[str, Tensor],
        microbatches: Microbatches,
        *,
        weights: Sequence[float] | None = None,
        gradient_scale: float = 1.0,
        in_part: Container[str] = (),
    ) -> StepSums:
        """Run ``train_step`` and return all that this rank computes. ``gradient_scale`` multiplies gradients, not the loss.

        ``in_part``: the leaves of ``batch`` that are this rank's part of each micro-batch already; others are whole.
        """
        for parameter in self._training.parameters:
            parameter.grad = None
        self._training.sums.clear()
        binder, shared = self._prepare(
            self._training, True, batch, microbatches, weights, in_part, gradient_scale
        )
        self._run(binder, shared)
        for runner in self._training.runners.values():
            runner.write_buffers()
        self.step += 1
        return StepSums.of(shared, self._training.result_share)

    def evaluate(
        self,
        batch: Mapping[str, Tensor],
        microbatches: Microbatches,
        *,
        loaded: Loaded,
        weights: Sequence[float] | None = None,
        keep_outputs: bool = True,
        in_part: Container[str] = (),
    ) -> StepSums:
        """Run forwards without gradients; buffers, gradients and ``step`` stay as they are.

        loaded        the graph to run, one of evaluation (batch norm in training mode would write buffers in place)
        keep_outputs  True: the result has the outputs, which costs their memory
        in_part       as in ``run_step``
        """
        binder, shared = self._prepare(loaded, False, batch, microbatches, weights, in_part)
        shared.outputs = [{} for _ in range(len(microbatches))] if keep_outputs else []
        with torch.no_grad():
            self._run(binder, shared)
        for runner in loaded.runners.values():
            runner.discard()
        result = StepSums.of(shared, loaded.result_share)
        shared.outputs = []
        return result

    def binding_with(self, make: MakeBinder) -> AbstractContextManager[None]:
        """Let ``make`` make the handlers of training steps meanwhile (``runtime.measure.instrument``)."""
        return self._training.binding_with(make)

    def batch_size_of(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of samples in ``batch``, which may lack leaves that this rank has no use for."""
        return batch_size_of(batch, self.batch_spec, self.leaf_names)

    def reported(self, *, call: bool = False) -> AbstractContextManager[None]:
        """Guard what other ranks may wait for: they learn what this rank raises in it. Refused after a failed step.

        ``call``: True for a collective call, of which a run is a part.
        """
        self._refuse_broken()
        return self._monitor.reported(call=call)

    def needed(self) -> AbstractContextManager[None]:
        """Guard what a call does before it runs: if it raises, ranks that run are told at once."""
        return self._monitor.needed()

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise UsageError(
                "nothing can be computed or gathered any more",
                because=[f"an earlier step failed: {self._broken}"],
                suggestions=["restart all ranks from the last checkpoint"],
            )

    def close(self) -> None:
        """Stop watching for failures. After one, end what is still under way: a freed group waits for its works."""
        self._monitor.close()
        if self._broken is not None and self._monitor.hang_up is not None:
            self._monitor.hang_up()

    # ------------------------------------------------------------------------------------------------------
    # Before a run

    def _next_run(self) -> int:
        """Return the first wait number of another run."""
        return next(self._runs) * _RUN

    def _prepare(
        self,
        loaded: Loaded,
        training: bool,
        batch: Mapping[str, Tensor],
        microbatches: Microbatches,
        weights: Sequence[float] | None,
        in_part: Container[str],
        gradient_scale: float = 1.0,
    ) -> tuple[Binder, Shared]:
        self._refuse_broken()
        spec = loaded.own.batch_spec
        if weights is None:
            weights = [size / microbatches.batch_size for size in microbatches.sizes]
        elif len(weights) != len(microbatches):
            raise UsageError(f"{len(weights)} weights were given for {len(microbatches)} micro-batches")
        shapes = {name: tuple(batch[name].shape) for name in spec.batch_dims if name in batch}
        binder, shared = loaded.bound(training, microbatches, shapes)
        for name, pieces in shared.pieces.items():
            leaf, dim = batch[name].detach(), spec.batch_dims[name]
            if name in in_part:
                parts = microbatches.batch_size // max(1, leaf.shape[dim]) if dim is not None else 1
                own = microbatches.cut(leaf.to(self.device, non_blocking=True), dim, parts)
            else:
                if name not in spec.placements:
                    leaf = leaf.to(self.device, non_blocking=True)
                own = [self._own_part(name, piece, spec) for piece in microbatches.cut(leaf, dim)]
            # A graph traced with contiguous inputs may hold views that other strides do not allow.
            pieces[:] = [piece.contiguous() for piece in own]
        shared.begin(tuple(weights), gradient_scale, self.step, self._next_run())
        return binder, shared

    def _own_part(self, name: str, piece: Tensor, spec: BatchSpec) -> Tensor:
        """Return what this rank reads of a leaf's micro-batch."""
        if name not in spec.placements or spec.mesh is None:
            return piece
        block = block_of(piece.shape, spec.placements[name], spec.mesh, self.program.rank)
        return block.of(piece).to(self.device, non_blocking=True)

    # ------------------------------------------------------------------------------------------------------
    # The run

    def _run(self, binder: Binder, shared: Shared) -> None:
        """Run the loop. Everything else in this file happens once."""
        self._active = binder
        try:
            for handler in binder.handlers:
                handler()
            binder.finish()
            self._synchronize()
        except BaseException as error:
            self._fail(error)
            raise
        shared.checked = True

    def _synchronize(self) -> None:
        """Let a GPU finish, within the time limit, where it waits for other ranks: alone it cannot hang."""
        if self.device.type != "cuda" or not self._waited:
            return
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        deadline = time.monotonic() + self._monitor.wait_seconds
        while not done.query():  # type: ignore[no-untyped-call]
            if time.monotonic() > deadline:
                pending = [number for number, work in self._waited if not work.is_completed()]
                self._monitor.waiting = pending[0] if pending else -1
                raise RuntimeError(f"the device did not finish within {self._monitor.wait_seconds:g} s")
            time.sleep(20e-6)
        self._waited.clear()

    def _fail(self, error: BaseException) -> None:
        """Free what the step holds; raise an error that names who failed, unless it was this rank itself."""
        waiting = self._monitor.waiting
        self._broken = error
        if self._active is not None:
            self._active.clear()
        self._waited.clear()
        for loaded in self._loaded:
            for runner in loaded.runners.values():
                runner.discard()
        self._monitor.waiting = -1
        if waiting < 0 or not isinstance(error, RuntimeError):
            self._monitor.lost()
            self._monitor.report_own(error)
            return
        peers, instruction = self._describe(waiting)
        raise self._monitor.explain(self.step, peers, instruction, error) from error

    def _describe(self, waiting: int) -> tuple[Sequence[int], str]:
        position = waiting % _RUN
        if position == _RUN - 1 or self._active is None:
            return self.collectives.waits_on, self.collectives.waits_for
        instruction = self._active.context.program.instructions[position]
        if isinstance(instruction, Send | Recv):
            message = instruction.message
            peer = message.target if isinstance(instruction, Send) else message.source
            return [peer], str(instruction)
        ranks = getattr(instruction, "ranks", ())
        if hasattr(instruction, "segment"):  # collectives inside of it
            ranks = self._active.context.own.graph.segments[instruction.segment].ranks
        others = [r for r in ranks if r != self.program.rank]
        return others or [self.program.rank], str(instruction)
