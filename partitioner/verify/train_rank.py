"""One rank's part of a verified training run: deploy, load data, step, save, resume; as a user's script would.

Runs are told by what they compute in and where they begin:

    float64, from the start    steps 1 2 | save | 3        what the rank holds is told after loading and at the end
    float64, resumed           load | steps 3 4            on an engine whose weights were others before
    the plan's own types       the same, from a checkpoint of its own

Every rank tells what it saw and what it holds, its own blocks only; nothing is compared here. Samples, the optimizer's
groups and the scheduler are shared with the plain loop.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from cost_models.errors import PartitionerError
from cost_models.precision import Precision
from partitioner.batches.batch_check import digest
from partitioner.batches.part_batch import AbsentBatch, PartBatch
from partitioner.deployment.deploy import deploy_plan
from partitioner.engine.engine import Engine
from partitioner.engine.optimizer import make_budgeted
from partitioner.models.workload import Workload
from partitioner.record.data import PlanData
from partitioner.verify.copies import workload_copy
from partitioner.verify.subject import trace_of
from passes.copies.dropout import without_dropout
from passes.copies.float64 import float64_by_default, in_float64
from passes.fidelity.agree import StepResult
from passes.graph.graph import OpGraph
from passes.graph.recomputed import draws_random_numbers
from passes.shard.rules.pointwise import RANDOM
from passes.trace.batch import flatten_batch, forward_names
from passes.trace.export import rebuild
from passes.trace.hook_reads import hooks_of
from runtime.mesh.sharding import Block

LEARNING_RATE = 1e-2
ORDER_SEED = 1
SAVED, ENDED, RESUMED_TO = 2, 3, 4
"""The step after which a checkpoint is saved, the last one of that run, and the last one of resumed runs."""
SMALLER_RATE = 0.5
"""The factor of the learning rate of vectors: two groups, so that a tensor in the wrong one is seen."""
SCHEDULER_STEPS = 7
OTHER_WEIGHTS = 0.5
"""The factor of all weights of an engine that is going to load a checkpoint."""
FEWEST_NUMBERS = 64
"""Numbers that are not all of 16 bits by chance, where they are sums of 32."""


def batch_of(
    leaves: Mapping[str, Tensor], batch_dims: Mapping[str, int | None], indices: Sequence[int]
) -> dict[str, Tensor]:
    """Return the leaves of a batch of these samples. Sample i is the i-th slice of every leaf along its batch dimension."""
    chosen = torch.tensor(indices)
    dims = {name: batch_dims.get(name) for name in leaves}
    return {
        n: leaf if (dim := dims[n]) is None else leaf.index_select(dim, chosen) for n, leaf in leaves.items()
    }


def sample_digests(leaves: Mapping[str, Tensor], batch_dims: Mapping[str, int | None]) -> tuple[int, ...]:
    """Return one number per sample of a batch, made of all its values."""
    dims = [(leaf, dim) for name, leaf in leaves.items() if (dim := batch_dims.get(name)) is not None]
    return tuple(
        int.from_bytes(
            hashlib.blake2b(
                str([digest(leaf.select(dim, i)) for leaf, dim in dims]).encode(), digest_size=7
            ).digest(),
            "little",
        )
        for i in range(dims[0][0].shape[dims[0][1]])
    )


def two_groups(kind: str, named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Make the optimizer called ``kind`` with two groups: matrices, and vectors at a smaller rate."""
    wide = [parameter for _, parameter in named if parameter.dim() > 1]
    flat = [parameter for _, parameter in named if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": wide}, {"params": flat, "lr": SMALLER_RATE * LEARNING_RATE}]
    return make_budgeted(kind, groups, LEARNING_RATE)


def annealing(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Make the scheduler of both worlds."""
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SCHEDULER_STEPS)


@dataclass(frozen=True)
class EngineRun:
    """One run of an engine, in float64 if ``double``: to a checkpoint and a step further, or from there if ``load``."""

    double: bool
    load: bool = False

    @property
    def last(self) -> int:
        """The number of its last step."""
        return RESUMED_TO if self.load else ENDED


@dataclass(frozen=True)
class TrainTask:
    """Everything that a rank needs to train as the plain loop does."""

    source: Callable[[], Workload]
    """Makes the workload, in this process."""
    weights: Mapping[str, Tensor] | None
    """The model's state dict, where ``source`` makes a model with other weights."""
    plan_json: str
    trace_options: Mapping[str, Any]
    leaves: Mapping[str, Tensor]
    """All samples, in float64."""
    batch_dims: Mapping[str, int | None]
    samples: int
    batch_size: int
    max_norm: float
    directory: str
    timeout_seconds: float
    runs: tuple[EngineRun, ...]


@dataclass(frozen=True)
class RankTensor:
    """A rank's values of a tensor, or of a block of it. ``key``: of an optimizer's state; ``block``: None for all of it."""

    kind: str
    name: str
    key: str
    block: Block | None
    value: Tensor

    @property
    def label(self) -> str:
        """The name in words."""
        return f"{self.name}.{self.key}" if self.key else self.name


@dataclass(frozen=True)
class RankRun:
    """All that one rank shows of one run. ``marks``: what its generators would draw, at saving or after loading."""

    data_rank: int
    steps: tuple[StepResult, ...]
    """Their losses, norms and rates."""
    samples: tuple[tuple[int, ...] | None, ...]
    """Digests of the samples in each step's batch; None for a step without a batch here."""
    loaded: tuple[RankTensor, ...]
    """Its tensors right after loading; of a run that saves, right before."""
    loaded_step: int | None
    last: tuple[RankTensor, ...]
    marks: tuple[float, ...]
    narrow_sums: tuple[str, ...]
    """Parameters whose summed gradients had no more digits than their 16-bit leaves, or another type than planned."""


def train_rank(task: TrainTask) -> list[RankRun] | PartitionerError:
    """Do all runs on this rank. Collective. An error that all ranks raise alike is returned, to be raised as it is."""
    try:
        plan, workload = PlanData.from_json(task.plan_json), task.source()
        if task.weights is not None:
            workload.model.load_state_dict(task.weights)
        # It was compared where the plan was verified; ranks may share the memory of one model.
        graph = trace_of(plan, workload, {**task.trace_options, "check": "off"})
        graphs = {
            double: without_dropout(in_float64(graph) if double else graph)[0]
            for double in {run.double for run in task.runs}
        }
        return [_run(task, run, plan, workload, graphs[run.double]) for run in task.runs]
    except PartitionerError as error:
        if type(error).__module__ == "cost_models.errors" and error.exit_code != 6:
            return error
        raise


def _run(task: TrainTask, run: EngineRun, plan: PlanData, source: Workload, graph: OpGraph) -> RankRun:
    """Train as a script would. ``graph``: without dropout, in the types of the run."""
    plan = _drawing_nothing(plan, graph)
    if run.double:
        plan = plan.model_copy(update={"precision": Precision()})
    workload = workload_copy(source, double=run.double, hooks=True)
    if run.load:
        _change_weights(workload.model)
    names, example = forward_names(workload.model), workload.example_inputs
    types = {name: leaf.dtype for name, leaf in flatten_batch(example, names).items()}

    def collated(indices: list[int]) -> Any:
        leaves = batch_of(task.leaves, task.batch_dims, indices)
        return rebuild(example, [leaf.to(types[name]) for name, leaf in leaves.items()])

    with (
        float64_by_default() if run.double else nullcontext(),
        deploy_plan(
            plan,
            workload,
            optimizer=partial(two_groups, plan.optimizer_memory),
            device="cpu",
            check_hosts=False,
            check_memory=False,
            timeout_seconds=task.timeout_seconds,
            graph=graph,
        ) as engine,
    ):
        loader = engine.dataloader(
            range(task.samples),
            batch_size=task.batch_size,
            shuffle=True,
            seed=ORDER_SEED,
            collate_fn=collated,
        )
        return _trained(engine, loader, task, run, plan, workload.model, graph)


def _trained(
    engine: Engine,
    loader: Any,
    task: TrainTask,
    run: EngineRun,
    plan: PlanData,
    model: nn.Module,
    graph: OpGraph,
) -> RankRun:
    """Load if the run does, train, save if it does; tell what is seen."""
    directory = f"{task.directory}/{'float64' if run.double else 'own types'}"
    scheduler = annealing(engine.optimizer)
    _draw_from(engine.rank + (100 if run.load else 0))
    loaded: tuple[RankTensor, ...] = ()
    loaded_step: int | None = None
    marks: tuple[float, ...] = ()
    narrow: tuple[str, ...] = ()
    if run.load:
        extra = engine.load(directory)
        scheduler.load_state_dict(extra["scheduler"])
        loader.load_state_dict(extra["loader"])
        loaded, loaded_step, marks = tuple(_tensors(engine, graph)), engine.step, _marks()
    steps: list[StepResult] = []
    samples: list[tuple[int, ...] | None] = []
    for batch in _batches(loader):
        rates = tuple(float(group["lr"]) for group in engine.optimizer.param_groups)
        if engine.step == 0:  # in parts, so that gradients are seen before they are clipped
            engine.zero_grad()
            loss = engine.forward_backward(batch)
            narrow = tuple(_narrow_sums(engine, plan, model))
            engine.clip_grad_norm_(task.max_norm)
            engine.optimizer.step()
        else:
            loss = engine.train_step(batch, max_grad_norm=task.max_norm)
        scheduler.step()
        info = engine.last_step
        assert info is not None
        assert info.grad_norm is not None
        steps.append(StepResult(float(loss), {}, {}, norm=float(info.grad_norm), rates=rates))
        if isinstance(batch, AbsentBatch):
            samples.append(None)
        else:
            part = batch.batch if isinstance(batch, PartBatch) else batch
            samples.append(sample_digests(flatten_batch(part, forward_names(model)), task.batch_dims))
        if engine.step == SAVED and not run.load:
            loaded, marks = tuple(_tensors(engine, graph)), _marks()
            state = {"scheduler": scheduler.state_dict(), "loader": loader.state_dict()}
            engine.save(directory, extra=state)
        if engine.step == run.last:
            break
    last = tuple(_tensors(engine, graph))
    return RankRun(engine.data_rank, tuple(steps), tuple(samples), loaded, loaded_step, last, marks, narrow)


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


def _change_weights(model: nn.Module) -> None:
    """Change the weights of a run that loads, in place: what it does not load is seen then."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() or parameter.is_complex():
                parameter.mul_(OTHER_WEIGHTS)
            else:  # codes of quantized weights
                parameter.bitwise_not_()


def _batches(loader: Any) -> Iterator[Any]:
    """Yield batches without end, epoch after epoch."""
    while True:
        yield from loader


def _tensors(engine: Engine, graph: OpGraph) -> Iterator[RankTensor]:
    """Yield copies of all that this rank holds between two steps."""
    state, specs = engine.state, {**graph.parameters, **graph.buffers}

    def tensor(kind: str, name: str, value: Tensor, key: str = "", *, whole: bool = False) -> RankTensor:
        """Find which block of which of the model's own tensors this rank holds as ``name``; ``whole``: it is no block."""
        block: Block | None = None
        if name in state.parts:
            name, block = state.parts[name].whole, state.parts[name].block
        elif name in state.shardings:
            sharding = state.shardings[name]
            owned = kind in ("parameter", "optimizer state")
            block = (sharding.owner_block if owned else sharding.leaf_block)(specs[name].shape, state.rank)
        return RankTensor(kind, name, key, None if whole else block, value.detach().clone())

    for name, parameter in engine.parameters.items():
        yield tensor("parameter", name, parameter)
        leaf = state.leaves.get(name, parameter)
        if leaf is not parameter:
            yield tensor("parameter as read", name, leaf)
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                whole = value.shape != parameter.shape
                yield tensor("optimizer state", name, value, key, whole=whole)
    for name, buffer in engine.buffers.items():
        yield tensor("buffer", name, buffer)


def _narrow_sums(engine: Engine, plan: PlanData, model: nn.Module) -> Iterator[str]:
    """Yield parameters whose gradients, summed over micro-batches, are not in the type that the plan sums them in.

    A 16-bit sum that was widened afterwards has 16-bit numbers only; a true sum of 32 bits has others among so many.
    A hook may return any numbers, so the gradients of parameters with hooks are not looked at.
    """
    if plan.microbatches < 2:
        return
    hooked = {name for name, parameter in model.named_parameters() if hooks_of(parameter)}
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
