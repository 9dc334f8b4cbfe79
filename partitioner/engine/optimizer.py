"""One optimizer over a model, most of whose parameters are on other ranks.

Whatever makes it sees all of the model's trainable parameters, in the model's order, on every rank: this rank's own,
and stand-ins of the right shape and type without memory (on the meta device) for the others. Afterwards stand-ins
are dropped from the groups, so that every rank has the same groups in the same order, some of them empty:

    made     [embed.weight  middle.weight  head.weight] [embed.bias  middle.bias]       embed is ours
    rank 0   [embed.weight]                             [embed.bias]
    rank 1   [middle.weight]                            [middle.bias]
    rank 2   [head.weight]                              []

A scheduler sets options of groups, so it does the same on every rank. Parameters that ranks hold in parts are whole while
it is made (``partitioner.engine.optimizer``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from cost_models.errors import UsageError
from partitioner.engine.optimizer_trials import (
    FOREIGN_ERRORS,
    options_of,
    refuse_heavier,
    refuse_whole_tensors,
)
from partitioner.record.data import PlanData
from passes.graph.graph import OpGraph
from runtime.state.rank_state import RankState

MAKE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "none": torch.optim.SGD,
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "fused-adamw": partial(torch.optim.AdamW, fused=True),
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
}


TAKE_SPARSE = frozenset({"none", "sgd"})
"""Those that take sparse gradients as they are."""


def make_budgeted(
    name: str, parameters: Iterable[nn.Parameter] | Iterable[dict[str, Any]], learning_rate: float
) -> torch.optim.Optimizer:
    """Make the optimizer called ``name``. Sparse gradients (of ``nn.Embedding(sparse=True)``) are made dense if need be."""
    optimizer = MAKE[name](parameters, lr=learning_rate)
    if name not in TAKE_SPARSE:
        optimizer.register_step_pre_hook(_with_dense_gradients)
    return optimizer


def _with_dense_gradients(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()


def make_optimizer(
    name: str, parameters: Iterable[nn.Parameter], learning_rate: float
) -> torch.optim.Optimizer | None:
    """Make the optimizer called ``name`` over ``parameters``; None where there are none (torch refuses an empty list)."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return make_budgeted(name, trained, learning_rate) if trained else None


WHOLE_MODEL = ("prodigy", "dadapt", "dog", "ldog", "dowg", "mechanize")
"""Beginnings of the names of optimizers that estimate one learning rate from all parameters together."""

MakeEngineOptimizer: TypeAlias = Callable[..., torch.optim.Optimizer]
"""A class, called with parameters and the given options; or a function of all (name, parameter) pairs."""


def make_engine_optimizer(
    make: MakeEngineOptimizer | None,
    options: Mapping[str, Any],
    plan: PlanData,
    graph: OpGraph,
    state: RankState,
    learning_rate: float,
    device: torch.device,
) -> torch.optim.Optimizer:
    """Make the optimizer of this rank's trainable parameters, with the groups of the whole model's.

    If ``make`` is None it is the plan's own kind, with ``learning_rate``. Raises PlanError where it needs more
    memory than the plan's ``optimizer_memory``.
    """
    pairs = [
        (name, state.parameters[name] if name in state.parameters else stand_in(spec.shape, owner))
        for name, spec in graph.parameters.items()
        if spec.requires_grad
        for owner in [graph.types_of(name, plan.precision).owner]
    ] or [("", stand_in((), torch.float32))]
    parameters = [parameter for _, parameter in pairs]
    made: object
    if make is None:
        made = make_optimizer(plan.optimizer_memory, parameters, learning_rate)
    elif isinstance(make, type):
        made = make(parameters, **options)
    else:
        made = make(pairs, **options)
    names = {id(parameter): name for name, parameter in pairs}
    optimizer = _checked(made, names, len({rank for ranks in state.holders.values() for rank in ranks}))
    parts = {name for name, sharding in state.shardings.items() if sharding.is_cut}
    parts |= {part.whole for part in state.parts.values()}
    refuse_whole_tensors(optimizer, names, parts, device)
    names |= put_parts(optimizer, names, state)
    refuse_heavier(optimizer, plan.optimizer_memory, names, {**state.holders, "": ()}, device)
    _drop_stand_ins(optimizer, [p for group in optimizer.param_groups for p in group["params"] if p.is_meta])
    return optimizer


def refuse_optimizer_options(make: object, options: Mapping[str, Any], learning_rate: float | None) -> None:
    """Raise UsageError for what is no way to make an optimizer, and for options that nothing would read."""
    problems, suggestions = [], []
    if make is not None and not callable(make):
        found = f"the text {make!r}" if isinstance(make, str) else f"{type(make).__name__}, already made"
        problems.append(
            f"optimizer= is {found}: a class, or a function of all (name, parameter) pairs is expected"
        )
        suggestions.append(
            'optimizer=torch.optim.AdamW, optimizer_kwargs={"lr": 3e-4}: each rank makes its own, of its parameters'
        )
    if make is None and options:
        problems.append(
            f"optimizer_kwargs= has {', '.join(options)}, and there is no optimizer= to take them"
        )
        suggestions.append("optimizer=torch.optim.AdamW")
    if make is not None and learning_rate is not None:
        problems.append(
            "learning_rate= is of the plan's own kind of optimizer; with optimizer= nothing reads it"
        )
        suggestions.append(f'optimizer_kwargs={{"lr": {learning_rate:g}}}')
    if problems:
        raise UsageError("cannot make this optimizer", problems, suggestions)


def _checked(made: object, names: Mapping[int, str], ranks: int) -> torch.optim.Optimizer:
    """Return ``made`` if it can run in parts, on every rank's own parameters. ``ranks``: the number that have some."""
    if not isinstance(made, torch.optim.Optimizer):
        raise UsageError(
            "optimizer= does not make an optimizer",
            because=[f"it returned {type(made).__name__}, not a torch.optim.Optimizer"],
            suggestions=["give a class, or a function of the list of (name, parameter) that returns one"],
        )
    problems = []
    if isinstance(made, torch.optim.LBFGS):
        problems.append("LBFGS calls the model itself, and multiplies gradients of all parameters together")
    kinds = [kind.__name__ for kind in type(made).__mro__ if kind.__name__.lower().startswith(WHOLE_MODEL)]
    if kinds and ranks > 1:
        problems.append(
            f"{kinds[0]} estimates its step size from all parameters together, and each rank has its own only"
        )
    strangers = sum(id(p) not in names for group in made.param_groups for p in group["params"])
    if strangers:
        problems.append(
            f"{strangers} of its parameters are not among those it was given; "
            "the engine's parameters are copies, the model's own are not trained"
        )
    if problems:
        raise UsageError(
            f"{type(made).__name__} cannot train a partitioned model",
            because=problems,
            suggestions=[
                "one that treats each parameter by itself, such as torch.optim.AdamW"
                if not strangers
                else "build it from the (name, parameter) pairs that the function gets"
            ],
        )
    return made


def _drop_stand_ins(optimizer: torch.optim.Optimizer, stand_ins: Collection[nn.Parameter]) -> None:
    """Leave only this rank's parameters in the groups and in the state."""
    dropped = {id(parameter) for parameter in stand_ins}
    for group in optimizer.param_groups:
        kept = [at for at, parameter in enumerate(group["params"]) if id(parameter) not in dropped]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [group[key][at] for at in kept]
    for parameter in stand_ins:
        optimizer.state.pop(parameter, None)


def put_parts(optimizer: torch.optim.Optimizer, names: Mapping[int, str], state: RankState) -> dict[int, str]:
    """Put every part into the group, and the place, of the parameter that it is of; stand-ins for other ranks' parts.

    ``names``: those of the parameters that the optimizer was made with, by id. Returns the names of the parts, by id.
    """
    found: dict[int, str] = {}
    for group in optimizer.param_groups:
        parameters: list[nn.Parameter] = []
        called: list[str] = []
        for parameter in group["params"]:
            name = names[id(parameter)]
            held = state.names_of(name)
            called += held
            if held == (name,):
                parameters.append(parameter)
                continue
            has_state = bool(optimizer.state.pop(parameter, None))
            for part in held:
                own = state.parameters.get(part)
                if own is None:
                    own = stand_in(state.parts[part].block.shape, parameter.dtype)
                elif has_state:
                    optimizer.state[own] = _first_state(type(optimizer), group, own)
                found[id(own)] = part
                parameters.append(own)
        group["params"] = parameters
        if "param_names" in group:
            group["param_names"] = called
    return found


def stand_in(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    """Make a parameter without memory."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))


def _first_state(cls: Any, group: Mapping[str, Any], part: nn.Parameter) -> Any:
    """Return the state that an optimizer which makes it at once (Adagrad) would have made for ``part``."""
    try:
        return cls([part], **options_of(cls, group)).state[part]
    except FOREIGN_ERRORS as error:
        raise UsageError(
            f"{cls.__name__} cannot train parts of parameters",
            because=[f"it has state before its first step, and cannot be made for a part alone: {error}"],
            suggestions=["one that makes its state in its first step, such as torch.optim.AdamW"],
        ) from error
