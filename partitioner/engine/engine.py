"""``Engine``: one rank of a running plan, as people train with it. Made by ``plan.deploy(model)``.

    loss = engine.train_step(batch, max_grad_norm=1.0)

is, in parts,

    engine.zero_grad()
    loss = engine.forward_backward(batch)
    engine.clip_grad_norm_(1.0)
    engine.optimizer.step()

Every method that computes is collective: all ranks call it, in the same order, with the same arguments.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from partitioner.batches.batch_check import BatchCheck
from partitioner.batches.loader import Consumer, EngineDataLoader, make_loader
from partitioner.batches.part_batch import AbsentBatch, PartBatch, leaves_in_part, normalized
from partitioner.batches.reader import BatchReader
from partitioner.batches.step import (
    SharedResults,
    StepInfo,
    refuse_autocast,
    refuse_no_grad,
    seed_scale,
    share_results,
    tokens_in,
)
from partitioner.engine.callbacks import ByParts, Callback, close_all
from partitioner.engine.checkpoints import Checkpoints, PendingSave
from partitioner.engine.gradient_hooks import GradientHooks, hooked_parameters
from partitioner.engine.profile import profile_steps
from partitioner.engine.weights import StateKeys
from partitioner.evaluation.evaluation import EvalOutput, Evaluator
from partitioner.evaluation.placed import Deployed
from partitioner.record.describe import token_leaf
from partitioner.report.profile import Profile
from passes.graph.token_counts import user_leaves
from passes.trace.loss.reduction import loss_weights, samples_in
from runtime.execute.gather_outputs import Gather
from runtime.execute.gradient_norm import global_norm, gradients_of, refuse_nonfinite
from runtime.state.step_precision import StepPrecision


class Engine:
    """One rank of a running plan. ``parameters`` holds only what this rank owns, by the model's own names.

    Where the plan runs ops in blocks of neurons, it holds parts of tensors: "fc1.weight#0" (``runtime.state.rank_state``).
    """

    def __init__(
        self,
        deployed: Deployed,
        optimizer: torch.optim.Optimizer,
        keys: StateKeys,
        *,
        check_batches: int,
        callbacks: Iterable[Callback],
    ) -> None:
        self.plan = plan = deployed.plan
        executor, state, graph = deployed.executor, deployed.state, deployed.training
        self.executor = executor
        self.state = state
        self.optimizer = optimizer
        self.last_step: StepInfo | None = None
        """The results of the latest training step."""
        sharded = executor.sharded_owners(state)
        self.precision = StepPrecision(state, plan.precision, executor.collectives, sharded)
        """The work on data types between steps; a loss scale keeps its state here."""
        self.precision.attach(optimizer)
        hooked = hooked_parameters(deployed.workload.model, graph, plan.precision)
        self._hooks = GradientHooks(hooked, state, executor.collectives)
        self.callbacks = list(callbacks)
        self._began = False
        self._by_parts = ByParts(optimizer, self.step_ended)
        self._skipped = False
        self._reader = BatchReader(plan.model.name, deployed.workload)
        self._graph = graph
        self._metric_names = tuple(output.name for output in graph.outputs if output.kind == "metric")
        self._loss_dtype: torch.dtype = graph.nodes[graph.loss or ""].meta["val"].dtype
        self._token_leaf = token_leaf(graph)
        user = user_leaves(graph.batch, graph.token_counts)
        self._place = deployed.place
        names = tuple(user.batch_dims)
        self._compare_batches = BatchCheck(names, executor.collectives, check_batches, self.data_world)
        self._evaluator = Evaluator(deployed)
        self._ranks = deployed.ranks
        self._checkpoints = Checkpoints(plan.model.name, keys, graph, state, executor.device)

    def __repr__(self) -> str:
        plan, ranks = self.plan, self.plan.world_size
        what = f"{plan.model.name}, rank {self.rank} of {ranks}, {plan.schedule}, step {self.step}"
        return f"Engine({what}, {len(self.parameters)} parameters on {self.executor.device})"

    @property
    def rank(self) -> int:
        """The rank of this process; rank 0 is the one that logs."""
        return self.state.rank

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters that the optimizer updates on this rank, by the model's own names."""
        return self.state.parameters

    @property
    def buffers(self) -> Mapping[str, Tensor]:
        """The buffers that this rank owns, by the model's own names."""
        return self.state.buffers

    @property
    def step(self) -> int:
        """Training steps so far: calls of ``forward_backward``. Dropout depends on it; a resumed run sets it."""
        return self.executor.step

    @step.setter
    def step(self, step: int) -> None:
        self.executor.step = step

    # ------------------------------------------------------------------------------------------ training

    def train_step(self, batch: Any, max_grad_norm: float | None = None) -> Tensor:
        """Do one optimizer step on ``batch`` (the whole batch, or what a loader gave). Returns the loss, on every rank.

        The loss is a detached float64 tensor of shape (). A batch may be shorter than planned, not longer.
        ``max_grad_norm``: clips as ``clip_grad_norm_`` does. ``last_step`` tells more about it.
        """
        started = time.perf_counter()
        with self.executor.reported(call=True):
            self.zero_grad()
            results, samples, tokens = self._forward_backward(batch, "train_step")
            norm = None if max_grad_norm is None else self._clip(max_grad_norm)
            self.optimizer.step()
            loss = self._finish(results, samples, tokens, norm, started)
            self.step_ended()
        return loss

    def forward_backward(self, batch: Any) -> Tensor:
        """Return the loss of ``batch``, on every rank, and leave its gradients in ``.grad`` of the parameters.

        Gradients are replaced, not added to: they are those of this batch, from zero. To accumulate over more
        samples, plan a larger ``batch_size``: micro-batches are what accumulates.
        """
        started = time.perf_counter()
        with self.executor.reported(call=True):
            results, samples, tokens = self._forward_backward(batch, "forward_backward")
            loss = self._finish(results, samples, tokens, None, started)
            self._by_parts.begin()
        return loss

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> Tensor:
        """Clip like ``torch.nn.utils.clip_grad_norm_``, over the whole model, tied parameters once. Returns the norm."""
        with self.executor.reported():
            norm = self._clip(max_norm, norm_type, error_if_nonfinite)
        if self.last_step is not None:
            self.last_step = dataclasses.replace(self.last_step, grad_norm=norm)
        return norm

    def zero_grad(self) -> None:
        """Drop all gradients of this rank."""
        self._by_parts.forget()
        for tensor in (*self.state.leaves.values(), *self.state.parameters.values()):
            tensor.grad = None

    def _forward_backward(self, batch: Any, method: str) -> tuple[SharedResults, int, int | None]:
        """Leave gradients in ``.grad``. Returns (loss and metrics on their way, samples, tokens)."""
        with self.executor.needed():
            refuse_no_grad(method)
            refuse_autocast(method, self.executor.device.type)
            if not self._began:
                self._began = True
                self._tell(lambda callback: callback.on_train_start(self))
            needed = self.executor.leaf_names
            leaves = self._reader.leaves(batch, needed)
            part = batch if isinstance(batch, PartBatch) else None
            samples = samples_in(self._graph, leaves, needed)
            samples = samples if part is None else part.samples
            number = None if part is None else part.place.rank
            self._compare_batches({} if isinstance(batch, AbsentBatch) else leaves, samples, number)
            cuts = self._place.cuts.of_training(samples, self.plan.model.name)
            weights = loss_weights(self._graph.loss_reduction, cuts.sizes)
            scale = seed_scale(weights, samples, self._loss_dtype)
            spec = self._graph.batch
            in_part = () if part is None else leaves_in_part(part, leaves, spec, cuts.sizes, self._place)
            sums = self.executor.run_step(
                normalized(self._graph, leaves, cuts.sizes, needed, batch, self.executor.collectives),
                cuts,
                weights=weights,
                gradient_scale=self.precision.gradient_scale * scale,
                in_part=in_part,
            )
        results = share_results(sums, self._metric_names, weights, self.executor.collectives)
        self._skipped = self.precision.after_backward(scale)
        if not self._skipped:
            self._hooks.run()
        parts = 1 if part is None else part.place.world
        return results, samples, tokens_in(self._graph.batch, self._token_leaf, leaves, samples, parts)

    def _clip(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        if self._skipped:  # what overflowed is dropped already, on all ranks
            return torch.full((), math.inf, dtype=torch.float64, device=self.executor.device)
        gradients = gradients_of(parameter for _, parameter in self.state.spoken_for())
        norm = global_norm(gradients, norm_type, self.executor.collectives)
        if error_if_nonfinite:
            refuse_nonfinite(norm, norm_type)
        clip_grads_with_norm_(self.state.parameters.values(), max_norm, norm)  # ``norm`` stays on its device
        return norm

    def _finish(
        self, results: SharedResults, samples: int, tokens: int | None, norm: Tensor | None, started: float
    ) -> Tensor:
        loss, metrics = results.wait()
        seconds = time.perf_counter() - started
        self.last_step = StepInfo(loss, norm, metrics, samples, tokens, seconds, self.step, self._skipped)
        return loss

    def step_ended(self) -> None:
        """Tell the callbacks of ``last_step``."""
        info = self.last_step
        assert info is not None
        self._tell(lambda callback: callback.on_step_end(self, info))

    def _tell(self, what: Callable[[Callback], None]) -> None:
        """Call every callback. If one raises on one rank, the others must hear why this one is gone."""
        with self.executor.reported():
            for callback in self.callbacks:
                what(callback)

    # ------------------------------------------------------------------------------------------ data

    @property
    def data_rank(self) -> int:
        """The part of each batch that this rank takes, of ``data_world``; ranks that split tensors take the same one."""
        return self._place.rank

    @property
    def data_world(self) -> int:
        """The number of parts that every batch is cut into; 1 where ranks need all of its samples."""
        return self._place.world

    def dataloader(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        seed: int | None = None,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        sampler: Iterable[Any] | None = None,
        pin_memory: bool | None = None,
        everywhere: bool = False,
        **options: Any,
    ) -> EngineDataLoader:
        """Make a ``torch.utils.data.DataLoader`` that yields the same batches in the same order on every rank. Collective.

        ``dataset``: with indices or iterable, the same on every rank; None is enough where no input is read.
        ``batch_size``: the plan's if not given. ``seed``: decides the order, another one every epoch, and whatever the
        dataset and ``collate_fn`` draw at random; the engine's if not given. ``sampler``: indices in an order of their
        own. ``pin_memory``: true on GPUs if not given. ``options``: others of torch's DataLoader, such as ``num_workers``.

        A rank whose part of the model reads no input gets an ``AbsentBatch``, one that reads part ``data_rank`` of the
        samples a ``PartBatch``, unless ``everywhere`` is true; with a ``collate_fn`` that changes how many samples there
        are, or makes something of all samples of a batch, it must be.
        """
        return make_loader(
            Consumer(self.executor, self._graph, self._checkpoints.free_side, self._place),
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            everywhere=everywhere,
            sampler=sampler,
            options=options,
        )

    # ------------------------------------------------------------------------------------------ evaluation

    def eval_step(self, batch: Any, gather: Gather | None = None) -> EvalOutput:
        """Return loss and metrics of ``batch`` in evaluation mode, on every rank; the model stays as it is.

        ``batch``: any number of samples. ``gather``: "rank0" or "all" also gives the model's outputs there, put
        together over micro-batches (``runtime.execute.gather_outputs``). The first call traces the model in evaluation
        mode.
        """
        output = self._evaluator.eval_step(batch, gather)
        self._tell(lambda callback: callback.on_evaluate_end(self, output))
        return output

    def forward(self, batch: Any, gather: Gather = "rank0") -> Mapping[str, Tensor] | None:
        """Return the model's outputs by name, in evaluation mode; None on ranks that ``gather`` leaves out.

        ``batch``: what the model's own ``forward`` takes; labels are not needed, nor any loss.
        """
        return self._evaluator.forward(batch, gather)

    # ------------------------------------------------------------------------------------------ measuring

    def profile(
        self, batches: Iterable[Any], steps: int | None = None, max_grad_norm: float | None = None
    ) -> Profile:
        """Train on ``batches`` (the first ``steps`` of them), measured: every instruction beside its prediction.

        These are steps like any other; without a profile nothing measures. The first one warms up, so give several.
        Collective; the same profile on every rank.
        """

        def measured(batch: Any) -> StepInfo:
            self.train_step(batch, max_grad_norm)
            assert self.last_step is not None
            return self.last_step

        parts = self.plan, self._ranks, self.executor, self.optimizer, self._checkpoints.free_side
        return profile_steps(measured, batches, steps, *parts)

    # ------------------------------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return the ``model.state_dict()`` of now: full on rank 0's CPU, an empty dict elsewhere."""
        with self.executor.reported():
            return self._checkpoints.state_dict()

    def save(
        self, directory: str | Path, extra: Any = None, *, asynchronous: bool = False, keep: int = 1
    ) -> PendingSave:
        """Write model, optimizer, step, random states and rank 0's ``extra`` as a new checkpoint in ``directory``.

        The newest ``keep`` checkpoints stay; until the new one is whole, so does the one before. ``extra``: numbers,
        texts, lists, tuples, dictionaries of them, and tensors. ``asynchronous``: return once everything is copied
        to memory; ``wait()`` of what is returned raises what went wrong while writing, else the next save does, or
        ``close``.
        """
        with self.executor.reported():
            pending = self._checkpoints.save(self, directory, extra, asynchronous=asynchronous, keep=keep)
        self._tell(lambda callback: callback.on_save(self, pending.path))
        return pending

    def load(self, directory: str | Path) -> Any:
        """Go on from the newest checkpoint in ``directory``, or the one that it is. Returns its ``extra``.

        It may have been saved under any plan, strategy and number of ranks. Learning rates and other options of the
        optimizer's groups are restored too; random states other than dropout's, if as many ranks saved it.
        """
        with self.executor.reported():
            extra = self._checkpoints.load(self, directory)
        self._compare_batches.rearm()
        self._tell(lambda callback: callback.on_load(self, Path(directory)))
        return extra

    # ------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop this rank's watchers and wait for a save under way; the process group stays for its owner."""
        close_all(self.callbacks, self, self.executor.close, self._checkpoints.close)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
