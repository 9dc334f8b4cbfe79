"""Opaque parts on their way through ``torch.export``: one custom op per call, replaced by the part's own op afterwards.

export sees      partitioner::opaque([x, weight, running_mean], "encoder.ctc#0") -> Tensor[]
graph has        opaque_encoder_ctc = opaque(encoder.ctc)(x, weight, running_mean)
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from passes.graph.nodes import is_size
from passes.trace.opaque.code import (
    OpaqueCode,
    checked_argument,
    identity_of,
    of_function,
    of_module,
    state_of,
    without_addresses,
)
from passes.trace.opaque.mark import ACTIVE
from passes.trace.opaque.open_sizes import OpenSizes, described, open_sizes
from passes.trace.opaque.refused import PartError, refuse_inner_gradients
from passes.trace.opaque.sizes import Observed, Point, UnfitError, apart, applied, observe_fake, points
from runtime.ops.opaque import Baked, Opaque, OpaqueResult, OpaqueSize, Slot, Tree
from runtime.ops.opaque_code import LOSS, called
from runtime.ranks.alone import NoGroupError
from runtime.user_code import innermost_module

_CALLS: dict[str, Opaque] = {}
"""The op of each call in the traces that are under way, by the key in its node."""


@torch.library.custom_op(
    "partitioner::opaque", mutates_args=(), schema="(Tensor[] tensors, str key) -> Tensor[]"
)
def _crossing(tensors: list[Tensor], key: str) -> list[Tensor]:
    return list(_CALLS[key](*tensors))


@_crossing.register_fake
def _shapes(tensors: list[Tensor], key: str) -> list[Tensor]:
    return list(_CALLS[key].shapes(tensors))


def _never(ctx: Any, *gradients: Any) -> Any:
    raise NotImplementedError("a trace runs no backward")


_crossing.register_autograd(_never)


@dataclass
class OpaqueParts:
    """The opaque parts of one trace: ``modules``, by path, and the calls of Functions and decorated functions.

    ``samples``: what each part did with real arguments, by the part's name, call by call: in batches of one, two and
    three times the size, and in one that repeats a sample.
    """

    model: nn.Module
    modules: Mapping[str, OpaqueCode]
    loss: OpaqueCode | None = None
    samples: Mapping[str, Sequence[Sequence[Observed]]] = field(default_factory=dict)
    calls: dict[str, Opaque] = field(default_factory=dict)
    _count: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, paths: Sequence[str], loss_fn: Any, opaque_loss: bool) -> OpaqueParts:
        """Take the code of the modules at ``paths``, and of the loss function if it is opaque."""
        parts = {}
        for path in paths:
            try:
                parts[path] = of_module(path, model.get_submodule(path), model)
            except UnfitError as error:
                raise _unfit(path, str(error), model, path) from error
        try:
            loss = of_function(LOSS, loss_fn) if opaque_loss else None
        except UnfitError as error:
            raise _unfit(LOSS, str(error), model, None) from error
        return cls(model, parts, loss)

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Let calls of the parts cross as single ops."""
        self._count.clear()
        with contextlib.ExitStack() as stack:
            for path, part in self.modules.items():
                module = self.model.get_submodule(path)
                stack.enter_context(
                    mock.patch.dict(module.__dict__, {"forward": self._stand_in(module, part)})
                )
            stack.enter_context(
                mock.patch.object(torch.autograd.Function, "apply", classmethod(self._applied()))
            )
            stack.enter_context(mock.patch.object(ACTIVE, "cross", self._function))
            stack.enter_context(refuse_inner_gradients(self.model))
            try:
                yield
            finally:
                for key in self.calls:
                    _CALLS.pop(key, None)

    def loss_function(self, loss_fn: Any) -> Any:
        """Return what stands for the loss function while the model is traced."""
        part = self.loss
        if part is None:
            return loss_fn
        return lambda output, batch: self._cross(part, [], (output, batch), {}, None)

    def _stand_in(self, module: nn.Module, part: OpaqueCode) -> Callable[..., Any]:
        @functools.wraps(module.forward)  # the batch's keys go to forward's arguments by their names
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._cross(part, state_of(part.code, module), args, kwargs, part.name)

        return forward

    def _applied(self) -> Callable[..., Any]:
        def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            differentiated = any(
                isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves((args, kwargs))
            )
            own = cls.__module__.startswith("torch.") or ACTIVE.cross is None
            if own or not differentiated or not torch.is_grad_enabled():
                return applied(cls)(*args, **kwargs)
            return self._function(cls, args, kwargs)

        return apply

    def _function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        inside = innermost_module(self.model)
        name = ".".join(filter(None, (inside, getattr(function, "__name__", "function"))))
        try:
            part = of_function(name, function)
        except UnfitError as error:
            raise _unfit(name, str(error), self.model, inside) from error
        return self._cross(part, [], args, kwargs, inside)

    # ---------------------------------------------------------------------------------------------
    # One call

    def _cross(
        self,
        part: OpaqueCode,
        state: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inside: str | None,
    ) -> Any:
        """Put one call into the trace. ``inside``: path of the module that is opaque if this call cannot be."""
        call = self._count.get(part.name, 0)
        self._count[part.name] = call + 1
        try:
            opaque, given, seen = self._opaque(part, state, args, kwargs, call)
        except UnfitError as error:
            raise _unfit(part.name, f"{error} ({part.source})", self.model, inside) from error
        key = f"{part.name}#{call}"
        self.calls[key] = _CALLS[key] = opaque
        results: list[Tensor] = torch.ops.partitioner.opaque(given, key)
        count = len(results) - len(opaque.written)
        first = len(given) - len(state)
        for index, new in zip(opaque.written, results[count:], strict=True):
            with torch.no_grad() if index >= first else contextlib.nullcontext():
                given[index].copy_(new)
        outputs = iter(
            result if differentiable or not result.is_floating_point() else result.detach()
            for result, differentiable in zip(results[:count], seen.differentiable, strict=True)
        )
        numbers = opaque.numbers(given)
        others = iter(seen.others)
        leaves = []
        for is_tensor in seen.tensors:
            if is_tensor:
                leaves.append(next(outputs))
                continue
            other = next(others)
            leaves.append(other.of(numbers) if isinstance(other, OpaqueSize) else other)
        return pytree.tree_unflatten(leaves, seen.structure)

    def _opaque(
        self,
        part: OpaqueCode,
        state: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        call: int,
    ) -> tuple[Opaque, list[Tensor], Observed]:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        structure = Tree.of(spec)
        assert structure is not None  # args and kwargs are one
        inputs = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())
        if not inputs:
            raise UnfitError("it is given no tensor")
        given = [*inputs, *state]
        place = {id(tensor): index for index, tensor in enumerate(inputs)}
        autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None

        def on(sizes: OpenSizes) -> Opaque:
            arguments: list[Slot | OpaqueSize | Baked] = []
            for leaf in leaves:
                if isinstance(leaf, Tensor):
                    arguments.append(Slot(place[id(leaf)]))
                elif is_size(leaf):
                    arguments.append(sizes.polynomial(leaf))
                else:
                    arguments.append(Baked(checked_argument(leaf)))
            values = [a.value for a in arguments if isinstance(a, Baked)]
            return Opaque(
                name=part.name,
                source=part.source,
                code=part.code,
                arguments=tuple(arguments),
                structure=structure,
                variables=sizes.variables,
                results=(),
                written=(),
                random=False,
                autocast=autocast,
                text=f"opaque {part.text} {without_addresses(repr(values))} {autocast}",
                identity="",
            )

        opaque, sizes, runs = self._runs(on, given, open_sizes(inputs), call)
        results, seen = described(runs, given, len(inputs))
        results += [
            OpaqueResult(tuple(map(sizes.polynomial, given[index].shape)), given[index].dtype)
            for index in seen.written
        ]
        measured = tuple(replace(run.work, numbers=p) for p, run in runs.items() if run.work is not None)
        opaque = replace(
            opaque,
            results=tuple(results),
            written=seen.written,
            random=seen.random,
            own_backward=seen.own_backward and not isinstance(part.code.target, type),
            draws_backward=seen.draws_backward,
            measured=measured,
        )
        content = (part.code.target, part.code.state, opaque.arguments, structure, opaque.results, autocast)
        sizes.join(given)
        return replace(opaque, identity=apart(lambda: identity_of(part.name, *content))), given, seen

    def _runs(
        self, on: Callable[[OpenSizes], Opaque], given: Sequence[Tensor], sizes: OpenSizes, call: int
    ) -> tuple[Opaque, OpenSizes, dict[Point, Observed]]:
        """Run the part at several sizes: on fake tensors with all sizes apart, with equal ones as one, or on real ones."""
        samples = self.samples.get(on(sizes).name)
        if samples is not None:
            way = sizes.joined
            if len(way.base) > 1:
                raise UnfitError("it runs on real tensors only, and several sizes of the batch are open")
            return on(way), way, _real_runs(samples[call], given, way.base)
        for way in [sizes] if sizes.joined == sizes else [sizes, sizes.joined]:
            opaque = on(way)
            try:
                seen = {p: observe_fake(opaque, way.shapes(given, p), given) for p in points(way.base)}
            except NoGroupError:  # real tensors would not help
                raise
            except Exception as error:  # noqa: BLE001 - the user's code may raise anything on fake tensors
                failure = error
            else:
                return opaque, way, seen
        raise NeedsSamplesError(opaque.name, opaque.called, failure) from failure


def _real_runs(runs: Sequence[Observed], given: Sequence[Tensor], base: Point) -> dict[Point, Observed]:
    """Return what was seen on real arguments, by the sizes that they stand for."""
    *grown, repeated = runs
    if tuple(tensor.dtype for tensor in given) != grown[0].given:
        raise UnfitError(
            "it runs on real tensors only, and gets other types of tensors in the precision that was asked for"
        )
    if repeated.shapes != grown[0].shapes:
        raise UnfitError("a size of its output depends on the numbers in its inputs")
    return dict(zip(points(base), grown, strict=False))


class NeedsSamplesError(Exception):
    """Raised where a part runs on real tensors only, and none are there.

    ``name``, ``called``: the part's, and in a sentence. ``error``: why it did not run on fake ones.
    """

    def __init__(self, name: str, called: str, error: BaseException) -> None:
        super().__init__(name)
        self.name, self.called, self.error = name, called, error


def _unfit(name: str, why: str, model: nn.Module, inside: str | None) -> PartError:
    larger = [inside.rpartition(".")[0] if inside == name else inside] if inside is not None else []
    if inside is None and name != LOSS:
        larger = [LOSS]
    return PartError(
        f"{called(name, dict(model.named_modules()).get(name))} cannot run as one opaque op",
        [why],
        ["opaque=[a larger module] keeps what is inside it out of the plan"],
        larger,
        name,
    )


def restore(graph: fx.Graph, calls: Mapping[str, Opaque]) -> None:
    """Replace the custom ops by the opaque ops that they stand for."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.partitioner.opaque.default:
            tensors, key = node.args
            opaque = calls[str(key)]
            with graph.inserting_before(node):
                new = graph.call_function(opaque, tuple(tensors))
            new.meta.update(node.meta)
            new.meta["source"] = opaque.source
            node.replace_all_uses_with(new)
            graph.erase_node(node)
