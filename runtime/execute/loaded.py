"""One graph on one rank: its segments bound to tensors, its programs, and handlers for every batch shape so far.

An executor has one of these for training and one for each evaluation graph; they share everything in ``Surroundings``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from cost_models.errors import UsageError
from runtime.execute.bind import Binder
from runtime.execute.context import ProgramContext, RankProgram, Shared, Surroundings
from runtime.execute.early_sends import EarlySends, early_outputs
from runtime.execute.release import releases
from runtime.mesh.axis import Axis
from runtime.mesh.ranks_along import JOINT, axis_of, ranks_along
from runtime.mesh.sharding import Sharding
from runtime.ops.bridges import axes_of, bind
from runtime.program.program import BackwardInput, Forward, Program, Recv, Send
from runtime.ranks.collective import Waited
from runtime.ranks.failure import FailureMonitor
from runtime.ranks.groups import create_channels
from runtime.segment.code import SegmentCode
from runtime.segment.microbatch import Microbatches, symbol_sizes
from runtime.segment.runner import SegmentRunner

_MOST_SHAPES = 32
"""Number of batch shapes whose handlers are kept; the oldest go first."""

MakeBinder = Callable[[ProgramContext, Shared], Binder]
"""Function that makes the handlers of a program for one batch shape."""


class SegmentWait:
    """The wait for a collective inside of a segment; its failure counts as that of the instruction that runs it."""

    def __init__(self, monitor: FailureMonitor, waited: Waited, *, on_gpu: bool) -> None:
        self._monitor, self._waited, self._on_gpu = monitor, waited, on_gpu
        self._timeout = timedelta(seconds=monitor.wait_seconds)

    def __call__(self, work: Any) -> None:
        monitor = self._monitor
        monitor.waiting = number = monitor.running
        if not self._on_gpu:
            work.wait(self._timeout)
        else:
            work.wait()
            if self._waited and self._waited[-1][0] == number:  # one after the other: the last says it all
                self._waited.pop()
            self._waited.append((number, _Passed()))
        monitor.waiting = -1


class _Passed:
    """The moment at which a GPU's stream is through with a wait. The work itself would keep its tensors alive."""

    def __init__(self) -> None:
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def is_completed(self) -> bool:
        """Tell whether the stream came so far."""
        return bool(self._event.query())


class Loaded:
    """The segments of one graph that this rank runs. Making it is collective: channels are created."""

    def __init__(self, surroundings: Surroundings, own: RankProgram, *, send_early: bool = True) -> None:
        program, codes, state, batch_spec = own.program, own.codes, own.state, own.batch_spec
        self.own = own
        self._surroundings = surroundings
        group = surroundings.group
        mine = sorted({i.segment for i in program.instructions if isinstance(i, Forward)})
        self.sums: dict[str, Tensor] = {}
        """This rank's part of each gradient's sum, by parameter, where ranks keep parts only."""
        shared = self._groups_needed(codes[i] for i in mine)
        if shared and group is None:
            raise UsageError(
                "ranks that share a segment need a process group", suggestions=["init_distributed(device)"]
            )
        self._channels = (
            {} if group is None else create_channels(program, group, surroundings.timeout_seconds, shared)
        )
        self.result_share = 1.0 / next(
            (
                len(mesh.ranks)
                for index in mine
                if (mesh := codes[index].mesh) is not None
                and any(o.kind in ("loss", "metric") for o in codes[index].outputs)
            ),
            1,
        )
        """Part of the batch's loss that this rank's loss is: ranks of one segment have parts of a sum."""
        split = {i.segment for i in program.instructions if isinstance(i, BackwardInput)}
        # On a GPU, a send from inside a shared segment could overtake a receive that another of its ranks posts.
        on_gpu = surroundings.device.type == "cuda"
        may = {i for i in mine if send_early and (codes[i].mesh is None or not on_gpu)}
        early = {i: early_outputs(codes[i], program) if i in may else () for i in mine}
        early_sends = {index: EarlySends() for index in mine if early[index]}
        self.runners = {
            index: SegmentRunner(
                codes[index] if codes[index].mesh is None else self._on_axes(codes[index]),
                state,
                split_backward=index in split,
                early=early[index],
                emit=early_sends[index].emit if index in early_sends else None,
                compile=surroundings.compile,
            )
            for index in mine
        }
        self._early = {index: (early[index], sends) for index, sends in early_sends.items()}
        self.microbatches = len({i.microbatch for i in program.instructions if isinstance(i, Forward)})
        """Number that the given program is made for; 0 on a rank that computes nothing."""
        self._programs = {self.microbatches: own.programs}
        self._contexts: dict[tuple[bool, int], ProgramContext] = {}
        self._bound: dict[object, tuple[Binder, Shared]] = {}
        self._make_binder: MakeBinder = Binder
        self.parameters = list(
            {
                id(state[i.name]): state[i.name]
                for index in mine
                for i in codes[index].inputs
                if i.kind == "parameter"
            }.values()
        )
        leaves = {name for runner in self.runners.values() for name in runner.leaf_names}
        sizes = {leaf for leaf, dim in batch_spec.symbols.values() if batch_spec.batch_dims.get(leaf) != dim}
        self.leaf_names = frozenset(leaves | sizes)
        """Leaves of a batch that this rank cannot do without."""

    def _groups_needed(self, codes: Iterable[SegmentCode]) -> set[tuple[int, ...]]:
        """Return the groups, ranks ascending, in which this rank runs bridges of ``codes`` and shares owners."""
        wanted = {(code.mesh, name) for code in codes if code.mesh for name in axes_of(code.module.graph)}
        wanted |= {(s.mesh, s.mesh.axes[axis]) for s in self.own.shardings.values() for axis, _ in s.cuts}
        return {tuple(sorted(ranks_along(mesh, name.split(JOINT), self.own.rank))) for mesh, name in wanted}

    def _on_axes(self, code: SegmentCode) -> SegmentCode:
        """Return ``code`` with its bridges bound to process groups."""
        assert code.mesh is not None
        around, rank = self._surroundings, self.own.rank
        wait = SegmentWait(around.monitor, around.waited, on_gpu=around.device.type == "cuda")
        axes = {
            name: axis_of(code.mesh, name, rank, self._channels, wait) for name in axes_of(code.module.graph)
        }
        # Compiling and splitting backward look for linear layers.
        fused = around.compile is None and not any(
            isinstance(i, BackwardInput) for i in self.own.program.instructions
        )
        return replace(code, module=bind(code.module, axes, fused=fused, regions=code.recomputed))

    def axis(self, sharding: Sharding, axis: int) -> Axis:
        """Return this rank's place on the axis of a sharding along which owners are parts of leaves."""
        mesh = sharding.mesh
        return axis_of(mesh, mesh.axes[axis], self.own.rank, self._channels)

    def bound(
        self, training: bool, microbatches: Microbatches, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[Binder, Shared]:
        """Return handlers for batches whose leaves have ``shapes``, and what they share with the executor."""
        key = (training, microbatches.sizes, tuple(shapes.items()))
        if key not in self._bound:
            if len(self._bound) >= _MOST_SHAPES:
                self._bound.pop(next(iter(self._bound)))
            context = self._context(training, len(microbatches))
            self._bound[key] = self._bind(context, microbatches, shapes)
        return self._bound[key]

    @contextmanager
    def binding_with(self, make: MakeBinder) -> Iterator[None]:
        """Let ``make`` make the handlers meanwhile, anew; afterwards those from before are back."""
        before = self._bound
        self._bound, self._make_binder = {}, make
        try:
            yield
        finally:
            self._bound, self._make_binder = before, Binder

    def _context(self, training: bool, microbatches: int) -> ProgramContext:
        """Return everything about a program for ``microbatches``, kept for the next batch."""
        key = (training, microbatches)
        if key not in self._contexts:
            programs = self._programs_for(microbatches)
            if not training:
                programs = [_forwards_of(program) for program in programs]
            program = programs[self.own.rank]
            self._contexts[key] = ProgramContext(
                self.own,
                self._surroundings,
                program,
                self.runners,
                self._channels,
                releases(program, self.own.graph, programs),
                self._early,
                self.sums,
                training,
            )
        return self._contexts[key]

    def _programs_for(self, microbatches: int) -> Sequence[Program]:
        """Return all ranks' programs for ``microbatches``."""
        if self.microbatches == 0:
            return self._programs[0]
        if microbatches not in self._programs:
            if self.own.replan is None:
                raise UsageError(
                    f"the program is made for {self.microbatches} micro-batches, not {microbatches}",
                    suggestions=[f"call with microbatches={self.microbatches}, or plan again"],
                )
            self._programs[microbatches] = self.own.replan(microbatches)
        return self._programs[microbatches]

    def _bind(
        self,
        context: ProgramContext,
        microbatches: Microbatches,
        shapes: Mapping[str, tuple[int, ...]],
    ) -> tuple[Binder, Shared]:
        moved = {i.message.value for i in context.program.instructions if isinstance(i, Send | Recv)}
        specs = {name: s for r in self.runners.values() for name, s in r.code.values.items() if name in moved}
        by_size = {}
        for size in set(microbatches.sizes):
            symbols = symbol_sizes(self.own.batch_spec, shapes, size)
            by_size[size] = {name: (spec.concrete(symbols), spec.dtype) for name, spec in specs.items()}
        leaves = {name for runner in self.runners.values() for name in runner.leaf_names}
        shared = Shared(
            microbatches=len(microbatches),
            shapes=[by_size[size] for size in microbatches.sizes],
            weights=(),
            pieces={name: [] for name in sorted(leaves)},
        )
        return self._make_binder(context, shared), shared


def _forwards_of(program: Program) -> Program:
    """Return the forwards and the messages between them."""
    return Program(
        program.rank,
        tuple(
            i
            for i in program.instructions
            if isinstance(i, Forward) or (isinstance(i, Send | Recv) and not i.message.gradient)
        ),
    )
