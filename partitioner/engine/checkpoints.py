"""``engine.state_dict``, ``engine.save`` and ``engine.load``: everything a run needs to go on, under any plan.

    model/NAME             parameters (what the optimizer updates) and buffers: whole, each rank's block where sharded,
                           each part where held in parts
    optimizer/NAME/KEY     the optimizer's state of a parameter
    random/RANK/GENERATOR  torch, cuda, python, numpy
    extra/PATH             tensors in what the user gave

These are tensors (``runtime.checkpoint.storage``); the rest (step, groups and their options, loss scale,
``extra``) is JSON. Names are the model's own, so the plan, the strategy and the number of ranks may change in between.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from cost_models.errors import CheckpointError, PartitionerError, UsageError
from partitioner.engine.weights import MODEL_PREFIX, StateKeys, converts, problem_of
from passes.graph.graph import OpGraph
from runtime.checkpoint.directory import StoredCheckpoint, begin, commit, find, is_checkpoint, read, remove
from runtime.checkpoint.optimizer import NamedOptimizer, merged_record
from runtime.checkpoint.storage import (
    BlockPlace,
    IndexEntry,
    PlacedTensors,
    merged_index,
    read_tensors,
    write_tensors,
)
from runtime.checkpoint.tree import decode, encode, tensor_names
from runtime.ranks.side_group import SideGroup
from runtime.state.gather import gather_state
from runtime.state.rank_state import RankState
from runtime.state.step_precision import StepPrecision


class TrainingRun(Protocol):
    """The parts of an engine that change while it trains, beside its tensors."""

    optimizer: torch.optim.Optimizer
    step: int

    precision: StepPrecision


class PendingSave:
    """A save that may still be writing."""

    def __init__(self, path: Path, write: Callable[[], None], *, asynchronous: bool) -> None:
        self.path = path
        self._write = write
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if asynchronous:
            self._thread = threading.Thread(target=self._run, name="partitioner-save")
            self._thread.start()
        else:
            write()

    def done(self) -> bool:
        """Tell whether nothing is being written any more."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Return the checkpoint, once every rank has written it. Raises what went wrong on any of them."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.path

    def _run(self) -> None:
        try:
            self._write()
        except BaseException as error:  # noqa: BLE001 - whatever it is, `wait` raises it
            self._error = error


class Checkpoints:
    """The state of one rank of one engine, as files and as a state dict. Methods are collective."""

    def __init__(
        self,
        model_name: str,
        keys: StateKeys,
        graph: OpGraph,
        state: RankState,
        device: torch.device,
    ) -> None:
        self._model_name, self._keys, self._shapes = model_name, keys, _stored_shapes(graph)
        self._state, self._device = state, device
        self._made_side: SideGroup | None = None
        self._pending: PendingSave | None = None

    def state_dict(self) -> dict[str, Any]:
        """Gather ``model.state_dict()`` on rank 0's CPU; an empty dict elsewhere."""
        self._settle()
        if self._keys.strange:
            raise UsageError(
                "the model's state dict cannot be gathered",
                [
                    f"{key} is made by a hook of the model, out of what is not known"
                    for key in self._keys.strange
                ],
            )
        keys = self._keys
        return gather_state(keys.order, keys.entries, keys.others, self._state, self._side)

    def save(
        self, run: TrainingRun, directory: str | Path, extra: Any, *, asynchronous: bool, keep: int
    ) -> PendingSave:
        """Write a checkpoint; see ``Engine.save``."""
        if keep < 1:
            raise UsageError(f"cannot keep {keep} checkpoints", suggestions=["keep=1 or more"])
        self._settle()
        side, root = self._side, Path(directory)
        tensors: dict[str, tuple[Tensor, BlockPlace]] = {}
        extra_data: list[Any] = []

        def prepare() -> Any:
            mine = self._written_here()
            places = self._places(self._held())
            tensors.update(self._of_model(mine, places))
            trained = [name for name in mine if name in self._state.parameters]
            named = NamedOptimizer(run.optimizer, self._state.parameters, places)
            record, of_optimizer = named.record(trained)
            tensors.update(of_optimizer)
            others = {f"random/{side.rank}/{n}": t for n, t in _random_states(self._device).items()}
            if side.rank == 0:
                data, of_extra = encode(extra, "extra")
                extra_data.append(data)
                others |= of_extra
            tensors.update({n: (t, BlockPlace.whole(n, t.shape)) for n, t in others.items()})
            return record

        names = dict.fromkeys(map(self._state.whole_of, self._state.holders))
        optimizer = merged_record(side.agree("saving", prepare), list(names))
        path = side.from_first("saving", lambda: begin(root, run.step))
        side.agree("saving", lambda: _refuse_invisible(path))
        record = {
            "model": self._model_name,
            "step": run.step,
            "world_size": side.size,
            "optimizer": optimizer,
            "loss_scale": run.precision.state_dict(),
            "extra": extra_data[0] if extra_data else None,
        }
        if asynchronous:

            def copy() -> None:
                for name, (tensor, place) in tensors.items():
                    tensors[name] = tensor.detach().to("cpu", copy=True), place

            side.agree("saving", copy)
        pending = PendingSave(
            path, lambda: _write(path, record, tensors, keep, side), asynchronous=asynchronous
        )
        if asynchronous:  # on all ranks alike, however it ends
            self._pending = pending
        return pending

    def load(self, run: TrainingRun, directory: str | Path) -> Any:
        """Go on from a checkpoint; see ``Engine.load``."""
        self._settle()
        side = self._side
        path = side.from_first("loading", lambda: find(Path(directory)))
        found: list[StoredCheckpoint] = []
        targets: dict[str, tuple[Tensor, BlockPlace]] = {}
        places = self._places(self._held())
        named = NamedOptimizer(run.optimizer, self._state.parameters, places)

        def prepare() -> None:
            checkpoint = read(path)
            found.append(checkpoint)
            self._refuse_other_model(checkpoint)
            record, index = checkpoint.record, checkpoint.index
            named.refuse_other(record["optimizer"])
            targets.update(self._of_model(places, places))
            targets.update(named.targets(record["optimizer"], index))
            wanted = [name for name in index if name.startswith(f"random/{side.rank}/")]
            wanted = wanted if record["world_size"] == side.size else []
            for name in (*wanted, *tensor_names(record["extra"])):
                shape, dtype = index[name].shape, index[name].dtype
                targets[name] = torch.empty(shape, dtype=dtype), BlockPlace.whole(name, shape)

        side.agree("loading", prepare)
        (checkpoint,) = found
        record, stored = checkpoint.record, (checkpoint.path, checkpoint.index)
        side.agree(f"loading {checkpoint.path}", lambda: read_tensors(*stored, targets))
        values = {name: tensor for name, (tensor, _) in targets.items()}

        def restore() -> None:
            named.restore(record["optimizer"], values)
            start = f"random/{side.rank}/"
            states = {n.removeprefix(start): t for n, t in values.items() if n.startswith(start)}
            if states:
                _restore_random_states(states, self._device)
            run.precision.load_state_dict(record["loss_scale"])
            run.step = record["step"]

        side.agree("loading", restore)
        run.precision.publish()
        return decode(record["extra"], values)

    def close(self) -> None:
        """Wait for what is being written. Not collective: a rank may be the only one that ends."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            try:
                pending.wait()
            finally:
                self._close_side()
        self._close_side()

    def _close_side(self) -> None:
        if self._made_side is not None:
            self._made_side.close()
            self._made_side = None

    @property
    def free_side(self) -> SideGroup:
        """The group beside the one that trains, once no save is using it. Collective."""
        self._settle()
        return self._side

    @property
    def _side(self) -> SideGroup:
        if self._made_side is None:
            self._made_side = SideGroup()
        return self._made_side

    def _settle(self) -> None:
        """Wait for the save that is under way: two would meet in one group's queue.

        An error of one rank, such as lost news of the others, is raised on all: none goes on alone.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._side.agree("the save that was under way", pending.wait)

    def _own(self, name: str) -> Tensor:
        return self._state.own(name).detach()

    def _names(self) -> list[str]:
        """List what ranks have of what a checkpoint holds, the same on every rank."""
        return [held for name in self._shapes for held in self._state.names_of(name)]

    def _held(self) -> list[str]:
        """List what this rank has of it."""
        return [name for name in self._names() if self._state.rank in self._state.holders[name]]

    def _written_here(self) -> list[str]:
        """List what this rank writes: its tensors or blocks, and its share of those that other ranks have as well."""
        written = []
        for number, name in enumerate(self._names()):
            holders = self._alike(name)
            if holders[number % len(holders)] == self._state.rank:
                written.append(name)
        return written

    def _alike(self, name: str) -> tuple[int, ...]:
        """Return the ranks with the same values under ``name``, this one among them if it has any."""
        sharding, rank = self._state.shardings.get(name), self._state.rank
        if sharding is None:
            return self._state.holders[name]
        part = sharding.owner_part(rank)
        return tuple(other for other in sharding.mesh.ranks if sharding.owner_part(other) == part)

    def _places(self, names: Iterable[str]) -> dict[str, BlockPlace]:
        """Return the places of this rank's tensors in the model's."""
        places = {}
        for name in names:
            whole = self._state.whole_of(name)
            shape = self._shapes[whole]
            places[name] = BlockPlace(whole, self._state.own_block(name, shape).offsets, shape)
        return places

    def _of_model(self, names: Iterable[str], places: Mapping[str, BlockPlace]) -> PlacedTensors:
        """Return this rank's tensors of the model as a checkpoint names them, beside their optimizer's state."""
        return {
            MODEL_PREFIX + n: (self._own(n), replace(places[n], name=MODEL_PREFIX + places[n].name))
            for n in names
        }

    def _refuse_other_model(self, checkpoint: StoredCheckpoint) -> None:
        stored = {
            name.removeprefix(MODEL_PREFIX): entry
            for name, entry in checkpoint.index.items()
            if name.startswith(MODEL_PREFIX)
        }
        problems, held = [], {self._state.whole_of(name): self._own(name).dtype for name in self._held()}
        for name, shape in self._shapes.items():
            if name in stored and stored[name].shape != shape:
                problems.append(f"{name} is {stored[name].shape} there, {shape} in the model")
            elif name in held and name in stored and not converts(stored[name].dtype, held[name]):
                problems.append(f"{name} is {stored[name].dtype} there, {held[name]} here")
        problems = problems[:20]
        problems += problem_of("missing", [name for name in self._shapes if name not in stored])
        problems += problem_of("not in the model", [name for name in stored if name not in self._shapes])
        if problems:
            raise CheckpointError(
                f"the checkpoint {checkpoint.path} of {checkpoint.record['model']} is not of {self._model_name}",
                problems,
                ["deploy the model that it was saved from"],
            )


def _stored_shapes(graph: OpGraph) -> dict[str, tuple[int, ...]]:
    """Return the shapes in a checkpoint of this model, by canonical name: also buffers that no state dict has."""
    written = {output.name for output in graph.outputs if output.kind == "buffer"}
    buffers = {name: s for name, s in graph.buffers.items() if s.persistent or name in written}
    return {name: spec.shape for name, spec in (*graph.parameters.items(), *buffers.items())}


def _write(
    path: Path,
    record: Mapping[str, Any],
    tensors: PlacedTensors,
    keep: int,
    side: SideGroup,
) -> None:
    """Write all ranks' tensors, then, on rank 0, what makes them a checkpoint. Collective."""
    doing = f"saving {path}"
    try:
        index: dict[str, list[IndexEntry]] = {}
        side.agree(doing, lambda: index.update(write_tensors(path, side.rank, tensors)))
        written = side.to_first(doing, index)
        side.from_first(doing, lambda: commit(path, record, merged_index(written), keep))
    except PartitionerError:
        # If only the news of success was lost, the checkpoint is whole.
        if side.rank == 0 and path.is_dir() and not is_checkpoint(path):
            remove(path)
        raise


def _refuse_invisible(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(
            f"{path} is not there",
            ["rank 0 made it, this rank does not see it"],
            ["save to a disk that all ranks share"],
        )


def _random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of this process's generators: torch's (and the device's), Python's and numpy's."""
    version, words, gauss = random.getstate()
    legacy: tuple[Any, ...] = tuple(np.random.get_state())
    _, key, position, has_gauss, cached = legacy
    states = {
        "torch": torch.get_rng_state(),
        # All are whole numbers below 2^32, or a float64: exact.
        "python": torch.tensor([version, math.nan if gauss is None else gauss, *words], dtype=torch.float64),
        "numpy": torch.tensor([position, has_gauss, cached, *key.tolist()], dtype=torch.float64),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def _restore_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the generators of this process to what ``_random_states`` returned."""
    torch.set_rng_state(states["torch"])
    version, gauss, *words = states["python"].tolist()
    random.setstate((int(version), tuple(map(int, words)), None if math.isnan(gauss) else gauss))
    position, has_gauss, cached, *key = states["numpy"].tolist()
    words32 = np.array(list(map(int, key)), dtype=np.uint32)
    np.random.set_state(("MT19937", words32, int(position), int(has_gauss), cached))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
