"""One rank's part of a verified training run: deploy, load data, step, save, resume; as a user's script would.

Runs are told by what they compute in and where they begin:

    float64, from the start    steps 1 2 | save | 3        what the rank holds is told after loading and at the end
    float64, resumed           load | steps 3 4            on an engine whose weights were others before
    the plan's own types       the same, from a checkpoint of its own

Every rank tells what it saw and what it holds, its own blocks only; nothing is compared here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cost_models.errors import PartitionerError
from cost_models.precision import Precision
from partitioner.batches.part_batch import AbsentBatch, PartBatch
from partitioner.deployment.deploy import deploy_plan
from partitioner.engine.engine import Engine
from partitioner.models.as_graph import as_graph
from partitioner.models.workload import Workload
from partitioner.record.data import PlanData
from partitioner.verify.grow_batch import rebuilt
from partitioner.verify.reference import double_copy
from partitioner.verify.train_hooks import Hooked, with_hooks_of
from partitioner.verify.train_setup import SampleSet, annealing, sample_digests, two_groups
from passes.evaluate.dropout import without_dropout
from passes.evaluate.float64 import float64_by_default, in_float64
from passes.graph.graph import OpGraph
from passes.graph.recomputed import draws_random_numbers
from passes.shard.rules.pointwise import RANDOM
from passes.trace.batch import flatten_batch, forward_names
from runtime.mesh.sharding import Block

OTHER_WEIGHTS = 0.5
"""The factor of all weights of an engine that is going to load a checkpoint."""


@dataclass(frozen=True)
class Run:
    """One run of an engine, to step ``last``. ``double``: in float64; ``load``: it begins with the checkpoint."""

    double: bool
    last: int
    save_after: int | None = None
    load: bool = False


@dataclass(frozen=True)
class Given:
    """The source of a workload that can be sent to other processes. ``hooked``: its model with hooks, if these go along."""

    workload: Workload
    hooked: Hooked | None = None

    def __call__(self) -> Workload:
        if self.hooked is not None:
            self.hooked.registered()
        return self.workload


@dataclass(frozen=True)
class TrainTask:
    """Everything that a rank needs to train as the plain loop does."""

    source: Callable[[], Workload]
    """Makes the workload, in this process."""
    weights: Mapping[str, Tensor] | None
    """The model's state dict, where ``source`` makes a model with other weights."""
    plan_json: str
    trace_options: Mapping[str, Any]
    samples: SampleSet
    batch_size: int
    max_norm: float
    learning_rate: float
    order_seed: int
    directory: str
    timeout_seconds: float
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Held:
    """A rank's values of a tensor, or of a block of it. ``key``: of an optimizer's state; ``block``: None for all of it."""

    kind: str
    name: str
    key: str
    block: Block | None
    value: Tensor


@dataclass(frozen=True)
class RankStep:
    """The results of one step on one rank. ``samples``: digests of those in its batch; None if it was given none."""

    number: int
    loss: float
    norm: float
    rates: tuple[float, ...]
    samples: tuple[int, ...] | None


@dataclass(frozen=True)
class RankRun:
    """All that one rank shows of one run. ``marks``: what its generators would draw, at saving or after loading."""

    data_rank: int
    steps: tuple[RankStep, ...]
    loaded: tuple[Held, ...]
    """Its tensors right after loading; of a run that saves, right before."""
    loaded_step: int | None
    last: tuple[Held, ...]
    marks: tuple[float, ...]
    narrow_sums: tuple[str, ...]
    """Parameters whose summed gradients had no more digits than their 16-bit leaves, or another type than planned."""


def train_rank(task: TrainTask) -> list[RankRun] | PartitionerError:
    """Do all runs on this rank. Collective. An error that all ranks raise alike is returned, to be raised as it is."""
    try:
        ready = _Ready.of(task)
        return [ready.run(run) for run in task.runs]
    except PartitionerError as error:
        if type(error).__module__ == "cost_models.errors" and error.exit_code != 6:
            return error
        raise


@dataclass(frozen=True)
class _Ready:
    """A rank's workload and its trace, made once for all runs."""

    task: TrainTask
    plan: PlanData
    workload: Workload
    graph: OpGraph

    @classmethod
    def of(cls, task: TrainTask) -> _Ready:
        plan, workload = PlanData.from_json(task.plan_json), task.source()
        if task.weights is not None:
            workload.model.load_state_dict(task.weights)
        graph = as_graph(
            workload,
            precision=plan.precision,
            loss_reduction=plan.loss_reduction,
            name=plan.model.name,
            **task.trace_options,
            check="off",  # compared where the plan was verified; ranks may share the memory of one model
        )
        return cls(task, plan, workload, graph)

    @cached_property
    def _graphs(self) -> dict[bool, OpGraph]:
        """The graph that is run in the plan's own types, and in float64; without dropout."""
        return {
            False: without_dropout(self.graph)[0],
            True: without_dropout(in_float64(self.graph))[0],
        }

    def run(self, run: Run) -> RankRun:
        own_plan = _drawing_nothing(self.plan, self._graphs[run.double])
        if run.double:
            plan = own_plan.model_copy(update={"precision": Precision()})
            workload = double_copy(self.workload)
            with_hooks_of(self.workload.model, workload.model)
            with float64_by_default():
                return self._run(run, plan, _made_other(workload, run))
        workload = self.workload.copied()
        with_hooks_of(self.workload.model, workload.model)
        return self._run(run, own_plan, _made_other(workload, run))

    def _run(self, run: Run, plan: PlanData, workload: Workload) -> RankRun:
        task = self.task
        directory = f"{task.directory}/{'float64' if run.double else 'own types'}"
        names, example = forward_names(workload.model), workload.example_inputs

        def batch_of(samples: list[dict[str, Tensor]]) -> Any:
            leaves = task.samples.collated(samples)
            if not run.double:
                given = flatten_batch(example, names)
                leaves = {name: leaf.to(given[name].dtype) for name, leaf in leaves.items()}
            return rebuilt(example, leaves, workload.model)

        with deploy_plan(
            plan,
            workload,
            optimizer=partial(two_groups, plan.optimizer_memory, task.learning_rate),
            device="cpu",
            check_hosts=False,
            check_memory=False,
            timeout_seconds=task.timeout_seconds,
            graph=self._graphs[run.double],
        ) as engine:
            scheduler = annealing(engine.optimizer)
            loader = engine.dataloader(
                task.samples,
                batch_size=task.batch_size,
                shuffle=True,
                seed=task.order_seed,
                collate_fn=batch_of,
            )
            _draw_from(engine.rank + (100 if run.load else 0))
            held: tuple[Held, ...] = ()
            loaded_step: int | None = None
            marks: tuple[float, ...] = ()
            if run.load:
                extra = engine.load(directory)
                scheduler.load_state_dict(extra["scheduler"])
                loader.load_state_dict(extra["loader"])
                held, loaded_step, marks = tuple(_held(engine, self.graph)), engine.step, _marks()
            steps: list[RankStep] = []
            narrow: tuple[str, ...] = ()
            for batch in _batches(loader):
                rates = tuple(float(group["lr"]) for group in engine.optimizer.param_groups)
                if engine.step == 0:  # in parts, so that gradients are seen before they are clipped
                    engine.zero_grad()
                    loss = engine.forward_backward(batch)
                    narrow = tuple(_narrow_sums(engine, plan, workload.model))
                    engine.clip_grad_norm_(task.max_norm)
                    engine.optimizer.step()
                else:
                    loss = engine.train_step(batch, max_grad_norm=task.max_norm)
                scheduler.step()
                info = engine.last_step
                assert info is not None
                assert info.grad_norm is not None
                seen = self._samples(batch, names)
                steps.append(RankStep(engine.step, float(loss), float(info.grad_norm), rates, seen))
                if engine.step == run.save_after:
                    held, marks = tuple(_held(engine, self.graph)), _marks()
                    state = {"scheduler": scheduler.state_dict(), "loader": loader.state_dict()}
                    engine.save(directory, extra=state)
                if engine.step == run.last:
                    break
            return RankRun(
                engine.data_rank,
                tuple(steps),
                held,
                loaded_step,
                tuple(_held(engine, self.graph)),
                marks,
                narrow,
            )

    def _samples(self, batch: Any, names: tuple[str, ...]) -> tuple[int, ...] | None:
        if isinstance(batch, AbsentBatch):
            return None
        given = batch.batch if isinstance(batch, PartBatch) else batch
        return sample_digests(flatten_batch(given, names), self.task.samples.batch_dims)


def _drawing_nothing(plan: PlanData, graph: OpGraph) -> PlanData:
    """Return the plan of ``graph``, whose dropout is off: on shards, such an op is run as itself, and draws nothing."""
    stages = []
    for stage in plan.stages:
        if stage.sharding is not None:
            choices = {
                op: ways
                if op not in graph.nodes or draws_random_numbers(graph.nodes[op])
                else tuple(way.replace(f" by {RANDOM}", "") for way in ways)
                for op, ways in stage.sharding.choices.items()
            }
            stage = stage.model_copy(
                update={"sharding": stage.sharding.model_copy(update={"choices": choices})}
            )
        stages.append(stage)
    return plan.model_copy(update={"stages": tuple(stages)})


def _made_other(workload: Workload, run: Run) -> Workload:
    """Change the weights of a run that loads, in place: what it does not load is seen then."""
    if run.load:
        with torch.no_grad():
            for parameter in workload.model.parameters():
                if parameter.is_floating_point() or parameter.is_complex():
                    parameter.mul_(OTHER_WEIGHTS)
                else:  # codes of quantized weights
                    parameter.bitwise_not_()
    return workload


def _batches(loader: Any) -> Iterator[Any]:
    """Yield batches without end, epoch after epoch."""
    while True:
        yield from loader


def _held(engine: Engine, graph: OpGraph) -> Iterator[Held]:
    """Yield copies of all that this rank holds between two steps."""
    state, specs = engine.state, {**graph.parameters, **graph.buffers}

    def place(name: str, *, trained: bool) -> tuple[str, Block | None]:
        """Return the model's own name of what this rank holds as ``name``, and which block of it that is."""
        if name in state.parts:
            return state.parts[name].whole, state.parts[name].block
        sharding = state.shardings.get(name)
        if sharding is None:
            return name, None
        block = sharding.owner_block if trained else sharding.leaf_block
        return name, block(specs[name].shape, state.rank)

    for name, parameter in engine.parameters.items():
        whole, block = place(name, trained=True)
        yield Held("parameter", whole, "", block, parameter.detach().clone())
        leaf = state.leaves.get(name, parameter)
        if leaf is not parameter:
            yield Held("parameter as read", *_joined(place(name, trained=False), leaf))
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                alike = value.shape == parameter.shape
                yield Held("optimizer state", whole, key, block if alike else None, value.detach().clone())
    for name, buffer in engine.buffers.items():
        yield Held("buffer", *_joined(place(name, trained=False), buffer))


def _joined(place: tuple[str, Block | None], value: Tensor) -> tuple[str, str, Block | None, Tensor]:
    return place[0], "", place[1], value.detach().clone()


def _narrow_sums(engine: Engine, plan: PlanData, model: nn.Module) -> Iterator[str]:
    """Yield parameters whose gradients, summed over micro-batches, are not in the type that the plan sums them in.

    A 16-bit sum that was widened afterwards has 16-bit numbers only; a true sum of 32 bits has others among so many.
    A hook may return any numbers, so the gradients of parameters with hooks are not looked at.
    """
    if plan.microbatches < 2:
        return
    hooked = {n for n, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks}
    for name, parameter in engine.parameters.items():
        part = engine.state.parts.get(name)
        if (name if part is None else part.whole) in hooked:
            continue
        leaf, gradient = engine.state.leaves.get(name, parameter), parameter.grad
        if gradient is None or gradient.is_sparse or not gradient.is_floating_point():
            continue
        # Said again here, not asked of the code that is tried: sums of 16-bit numbers have 32 bits, or what is fixed.
        wanted = plan.precision.gradients or (leaf.dtype if leaf.dtype.itemsize >= 4 else torch.float32)
        if gradient.dtype.itemsize < wanted.itemsize:
            yield f"{name} is summed in {gradient.dtype}, planned in {wanted}"
            continue
        filled = gradient[gradient != 0]
        if wanted.itemsize < 4 or leaf.dtype.itemsize >= 4 or filled.numel() < FEWEST_NUMBERS:
            continue
        if torch.equal(filled.to(leaf.dtype).to(filled.dtype), filled):
            yield f"{name} is summed to numbers of {leaf.dtype} only, planned in {wanted}"


FEWEST_NUMBERS = 64
"""Numbers that are not all of 16 bits by chance, where they are sums of 32."""


def _draw_from(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _marks() -> tuple[float, ...]:
    """Return what the generators would draw next; they stay as they are."""
    before = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    marks = float(torch.rand(())), random.random(), float(np.random.rand())
    torch.default_generator.set_state(before[0])
    random.setstate(before[1])
    np.random.set_state(before[2])
    return marks
