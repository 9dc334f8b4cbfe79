"""The values of parameters and buffers, each rank asking only for its own.

Where a value comes from, first match:

    1. ``weights``          files, read into the tensor's own memory: no more than the tensor is ever held
    2. ``state_dict``       under the canonical name or any alias of it
    3. the model itself     if it has real tensors
    4. a rebuilt submodule  non-persistent buffers of a meta model (rotary tables): no checkpoint holds them,
                            but a Hugging Face submodule made from its config alone recomputes them
    5. ``init_fn(module)``  called on a private copy of the owning submodule, on CPU, seeded by its path, so
                            that every rank that holds a tied parameter draws the same numbers

What has no value then is an error that names it.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from cost_models.errors import ModelError
from cost_models.units import listed
from passes.trace.names import StateNames, state_names
from runtime.checkpoint.safetensors import StoredTensor
from runtime.checkpoint.storage import StoredPieces
from runtime.mesh.sharding import Block
from runtime.state.rank_state import TensorPart

logger = logging.getLogger("partitioner")

InitFunction: TypeAlias = Callable[[nn.Module], Any]
"""Fills a module's own parameters and buffers in place, as ``model._init_weights`` and FSDP's
``param_init_fn`` do.
"""


_MOST_NAMED = 10
"""So many names are listed in an error; more are counted."""

REBUILD_LIMIT_ELEMENTS = 2**28
"""A submodule with more parameters than this (1 GiB in 32 bits) is not rebuilt for the sake of a buffer."""


def values_of(
    names: Iterable[str],
    *,
    model: nn.Module | None = None,
    weights: Mapping[str, Sequence[StoredTensor | StoredPieces]] | None = None,
    state_dict: Mapping[str, Tensor] | None = None,
    init_fn: InitFunction | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    blocks: Mapping[str, Block] | None = None,
    wider: Mapping[str, torch.dtype] | None = None,
    parts: Mapping[str, TensorPart] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield copies of the real values of the parameters and buffers called ``names``, on ``device``, one by one.

    Names that have no value are told at the end.

    Without a ``state_dict`` entry, ``model`` says shape and dtype and must be given. ``weights``: the stored
    tensor by canonical name, or several (under each name of a tied one), which must be the same. ``blocks``: the parts
    of tensors that are wanted in part; a submodule that ``init_fn`` fills is whole for as long as one of its names is
    asked for. ``wider``: types in which ``weights`` are read instead of the model's own, where they have more digits
    (master copies). ``parts``: names that are no names of the model, and the blocks of its tensors that they stand for.
    """
    wanted = list(names)
    places = parts or {}
    known = state_names(model) if model is not None else StateNames({}, {}, {})
    if model is not None and state_dict:
        _compare_names(state_dict, known, model)
        _compare_views(state_dict, known)
    source = _Source(
        model,
        known,
        state_dict or {},
        init_fn,
        seed,
        [places[n].whole if n in places else n for n in wanted],
    )
    problems: list[str] = []
    for name in wanted:
        whole, block = name, (blocks or {}).get(name)
        if name in places:
            whole, block = places[name].whole, places[name].block
        try:
            stored = (weights or {}).get(known.canonical(whole))
            if stored:
                yield name, _read(whole, stored, known, device, (wider or {}).get(name), block)
            else:
                yield name, source.copied(whole, block, device)
        except _NoValueError as error:
            if str(error) not in problems:  # parts of one tensor
                problems.append(str(error))
        source.forget(whole)
    if problems:
        more = len(problems) - _MOST_NAMED
        raise ModelError(
            f"{len(problems)} of {len(wanted)} parameters and buffers have no values",
            [*problems[:_MOST_NAMED], *([f"and {more} more"] if more > 0 else [])],
            [
                "weights= a safetensors file or directory, or state_dict={name: tensor}, with all of them",
                "init_fn=callable(module) that fills a submodule in place (Hugging Face: model._init_weights)",
                "build the model with real tensors instead of torch.device('meta')",
            ],
        )


def _compare_names(state_dict: Mapping[str, Tensor], known: StateNames, model: nn.Module) -> None:
    """Raise ModelError for names that nothing would read (those of a wrapped model would leave all as it was); warn of
    what is not given.
    """
    expected = model.state_dict()
    unknown = [
        n
        for n in state_dict
        if n not in {*known.parameters, *known.buffers, *known.aliases, *known.views, *expected}
    ]
    if unknown:
        raise ModelError(
            f"state_dict= has tensors that {type(model).__name__} does not have",
            [listed(unknown, _MOST_NAMED, count_rest=True)],
            ["rename or drop them: names are those of model.state_dict()"],
        )
    given = {known.canonical(name) for name in state_dict}
    missing = [n for n in expected if known.canonical(n) not in given and n not in known.views]
    if missing:
        logger.warning(
            "state_dict= lacks %s: what the model or init_fn has there is trained on",
            listed(missing, _MOST_NAMED, count_rest=True),
        )


def _compare_views(state_dict: Mapping[str, Tensor], known: StateNames) -> None:
    """Raise ModelError where ``state_dict`` has other values for a view than for its owner, which is what is read."""
    own_names = {known.canonical(name): name for name in state_dict}
    problems = []
    for name, view in known.views.items():
        if name not in state_dict:
            continue
        owner = own_names.get(view.owner)
        if owner is None:
            problems.append(f"{name} is a view of {view.owner}, which is not given")
        elif not torch.equal(view.of(state_dict[owner]), state_dict[name].to(state_dict[owner].device)):
            problems.append(f"{name} is {view} in the model, and has other values than {owner}")
    if problems:
        raise ModelError(
            "state_dict= does not fit the memory that the model shares",
            problems[:_MOST_NAMED],
            ["give the owners' values; views need not be given"],
        )


class _NoValueError(Exception):
    """One name without a value; collected into one ModelError."""


@dataclass
class _Source:
    """Looks values up; submodules that had to be made are kept for the next name."""

    model: nn.Module | None
    known: StateNames
    state_dict: Mapping[str, Tensor]
    init_fn: InitFunction | None
    seed: int
    wanted: InitVar[Sequence[str]]
    rebuilt: dict[str, nn.Module | None] = field(default_factory=dict)
    initialized: dict[str, nn.Module] = field(default_factory=dict)

    def __post_init__(self, wanted: Sequence[str]) -> None:
        self.left = Counter(self._owner(name) for name in wanted)

    def copied(self, name: str, block: Block | None, device: torch.device | str) -> Tensor:
        """Copy the value of ``name``, or a block of it, into memory of its own and the type that the model has it in."""
        value, canonical = self.value(name), self.known.canonical(name)
        spec = self.known.parameters.get(canonical) or self.known.buffers.get(canonical)
        dtype = value.dtype if spec is None else spec.dtype
        if block is None:
            return value.to(device, dtype, copy=True)
        return block.of(value).to(device, dtype, copy=True, memory_format=torch.contiguous_format)

    def forget(self, name: str) -> None:
        """Note that ``name`` has its value: what was made for its submodule goes with the last of them."""
        owner = self._owner(name)
        self.left[owner] -= 1
        if not self.left[owner]:
            self.rebuilt.pop(owner, None)
            self.initialized.pop(owner, None)

    def _owner(self, name: str) -> str:
        return self.known.canonical(name).rpartition(".")[0]

    def value(self, name: str) -> Tensor:
        canonical = self.known.canonical(name)
        found = self._from_state_dict(canonical)
        if found is not None:
            return found
        if self.model is None:
            raise _NoValueError(f"{name} is not in the state dict, and no model was given")
        owner, _, attribute = canonical.rpartition(".")
        try:
            module = self.model.get_submodule(owner)
        except AttributeError as error:
            raise _NoValueError(f"{name} is no parameter or buffer of the model") from error
        tensor = _own_tensor(module, attribute)
        if tensor is None:
            raise _NoValueError(f"{name} is no parameter or buffer of the model")
        if not tensor.is_meta:
            return tensor.detach()
        return self._made(canonical, owner, attribute, module, tensor)

    def _from_state_dict(self, canonical: str) -> Tensor | None:
        names = [canonical, *(alias for alias, target in self.known.aliases.items() if target == canonical)]
        found = next((self.state_dict[n] for n in names if n in self.state_dict), None)
        if found is None:
            return None
        if found.is_meta:
            raise _NoValueError(f"{canonical} is on the meta device in the state dict")
        spec = self.known.parameters.get(canonical) or self.known.buffers.get(canonical)
        if spec is not None and tuple(found.shape) != spec.shape:
            raise _NoValueError(
                f"{canonical} is {tuple(found.shape)} in the state dict, {spec.shape} in the model"
            )
        return found.detach()

    def _made(self, name: str, owner: str, attribute: str, module: nn.Module, tensor: Tensor) -> Tensor:
        """Make a value for a meta tensor: a non-persistent buffer's from the rebuilt submodule, others by ``init_fn``."""
        why = ["is on the meta device"]
        if attribute in module._non_persistent_buffers_set:
            if owner not in self.rebuilt:
                self.rebuilt[owner] = self._rebuild(module, owner)
            rebuilt = self.rebuilt[owner]
            value = rebuilt._buffers.get(attribute) if rebuilt is not None else None
            if value is not None and value.shape == tensor.shape and not value.is_meta:
                return value.detach().to(tensor.dtype)
            why.append("is in no state dict (persistent=False)")
            why.append(f"{type(module).__name__} cannot be rebuilt from a config")
        if self.init_fn is None:
            raise _NoValueError(f"{name} {', '.join(why)}, and there is no init_fn")
        if owner not in self.initialized:
            self.initialized[owner] = _initialize(module, self.init_fn, self._seed_of(owner))
        value = _own_tensor(self.initialized[owner], attribute)
        if value is None or _is_unset(value):
            raise _NoValueError(f"{name} {', '.join(why)}, and init_fn leaves it unset")
        return value.detach()

    def _rebuild(self, module: nn.Module, path: str) -> nn.Module | None:
        """Make ``module`` anew, with the config that it or the nearest module around it keeps."""
        config = getattr(module, "config", None)
        while config is None and path and self.model is not None:
            path = path.rpartition(".")[0]
            config = getattr(self.model.get_submodule(path), "config", None)
        return _rebuild(module, config, self._seed_of(path))

    def _seed_of(self, path: str) -> int:
        digest = hashlib.sha256(f"{self.seed}:{path}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1


def _read(
    name: str,
    stored: Sequence[StoredTensor | StoredPieces],
    known: StateNames,
    device: torch.device | str,
    wider: torch.dtype | None = None,
    block: Block | None = None,
) -> Tensor:
    """Read a stored value (or ``block`` of it) into memory of its own; ``wider``: a type with more digits."""
    first, *others = stored
    if others and any(o.dtype != first.dtype or o.checksum() != first.checksum() for o in others):
        raise _NoValueError(f"{name} is tied in the model, and stored with different values under its names")
    spec = known.parameters.get(known.canonical(name)) or known.buffers[known.canonical(name)]
    dtype = spec.dtype if wider is None or wider.itemsize <= spec.dtype.itemsize else wider
    block = block or Block((0,) * len(spec.shape), spec.shape)
    tensor = torch.empty(block.shape, dtype=dtype, device=device)
    first.read_block(tensor, block.offsets)
    return tensor


def _own_tensor(module: nn.Module, attribute: str) -> Tensor | None:
    parameter = module._parameters.get(attribute)
    return module._buffers.get(attribute) if parameter is None else parameter


def _rebuild(module: nn.Module, config: Any, seed: int) -> nn.Module | None:
    """Make the module anew on CPU if its config (and layer index) is all its constructor needs, else return None."""
    if sum(p.numel() for p in module.parameters()) > REBUILD_LIMIT_ELEMENTS:
        return None
    parameters = list(inspect.signature(type(module)).parameters.values())
    available = {"config": config, "layer_idx": getattr(module, "layer_idx", None)}
    arguments = {p.name: available[p.name] for p in parameters if available.get(p.name) is not None}
    needed = {
        p.name
        for p in parameters
        if p.default is inspect.Parameter.empty
        and p.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    }
    if "config" not in arguments or needed - arguments.keys():
        return None
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        return type(module)(**arguments)


def _initialize(module: nn.Module, init_fn: InitFunction, seed: int) -> nn.Module:
    """Copy ``module`` with CPU tensors of its own (its children are shared), filled by ``init_fn``.

    Floating-point values start as NaN, so that what ``init_fn`` leaves out is found.
    """
    twin = copy.copy(module)
    parameters: dict[str, Any] = {
        name: nn.Parameter(_unset(p), p.requires_grad) if p is not None else None
        for name, p in module._parameters.items()
    }
    buffers = {
        name: b.detach().clone() if b is not None and not b.is_meta else (None if b is None else _unset(b))
        for name, b in module._buffers.items()
    }
    twin.__dict__["_parameters"] = parameters
    twin.__dict__["_buffers"] = buffers
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        init_fn(twin)
    return twin


def _is_unset(value: Tensor) -> bool:
    if not value.is_floating_point() or not value.numel():
        return False
    return bool(value[(0,) * value.dim()].isnan()) and bool(value.isnan().all())


def _unset(tensor: Tensor) -> Tensor:
    real = torch.zeros(tensor.shape, dtype=tensor.dtype)
    return real.fill_(float("nan")) if real.is_floating_point() else real
