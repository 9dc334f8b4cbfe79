"""Runs of an opaque part at a few sizes, and the polynomials that its results' sizes are.

    batch    2    4    6          result [batch, 3·batch]          a·batch + b from the first two, the third must agree
    sizes  2×6  4×12  6×18

Runs are on fake tensors, and where those cannot tell (sizes that depend on numbers), on real ones. They happen in a thread
of their own: the modes of the export that is under way do not reach there.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from passes.trace.noted import equal
from runtime.ops.opaque import Measured, Opaque, OpaqueSize, no_compile
from runtime.ranks.alone import alone

T = TypeVar("T")

APPLY = torch.autograd.Function.__dict__["apply"]
"""The way in which torch applies a Function, which a trace replaces; since torch 2.14 a descriptor written in C."""

_CALL, _GETATTR = nn.Module.__call__, nn.Module.__getattr__

_UNDECLARED = {
    "aten::native_batch_norm": (3, 4),
    "aten::cudnn_batch_norm": (3, 4),
    "aten::miopen_batch_norm": (3, 4),
}
"""Kernels that write arguments (running statistics, at these places) without saying so in their schema."""


class UnfitError(Exception):
    """The reason why a part cannot be one op."""


@dataclass(frozen=True)
class Observed:
    """The outcome of one run of the code."""

    given: tuple[torch.dtype, ...]
    """The types of the arguments."""
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    differentiable: tuple[bool, ...]
    tensors: tuple[bool, ...]
    """True for each of the outputs, in order, that is a tensor."""
    others: tuple[Any, ...]
    """The outputs that are none."""
    structure: pytree.TreeSpec
    written: tuple[int, ...]
    random: bool
    own_backward: bool
    draws_backward: bool
    work: Measured | None = None
    """The work of a run on real tensors, counted."""


class _StorageWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Sees which of the given storages are written, and whether random numbers are drawn."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._given = {storage_of(tensor): index for index, tensor in enumerate(given)}
        self.written: set[int] = set()
        self.random = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        self.random |= torch.Tag.nondeterministic_seeded in func.tags
        places = _UNDECLARED.get(func._schema.name, ())
        for place, declared in enumerate(func._schema.arguments):
            if place in places or (declared.alias_info is not None and declared.alias_info.is_write):
                value = options.get(declared.name, args[place] if place < len(args) else None)
                for tensor in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(tensor, Tensor) and storage_of(tensor) in self._given:
                        self.written.add(self._given[storage_of(tensor)])
        return func(*args, **options)


def storage_of(tensor: Tensor) -> int:
    """Identify a tensor's storage while the tensor lives."""
    return int(tensor.untyped_storage()._cdata)


def applied(cls: type) -> Callable[..., Any]:
    """Return torch's own ``cls.apply`` of a Function, whatever stands there while a trace is under way."""
    bound: Callable[..., Any] = APPLY.__get__(None, cls)
    return bound


def apart(function: Callable[[], T]) -> T:
    """Run a function in a thread of its own, where no mode of this one is active."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            # An export replaces methods of all modules, a trace of ours that of all Functions: here they are torch's own.
            with (
                alone(),
                mock.patch.object(torch.autograd.Function, "apply", APPLY),
                mock.patch.object(nn.Module, "__call__", _CALL),
                mock.patch.object(nn.Module, "__getattr__", _GETATTR),
            ):
                results.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="opaque")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def observe_fake(opaque: Opaque, shapes: Sequence[Sequence[int]], given: Sequence[Tensor]) -> Observed:
    """Run the code on fake tensors like ``given``, of these shapes."""

    def run() -> Observed:
        with FakeTensorMode(allow_non_fake_inputs=True):
            tensors = [
                torch.empty(list(shape), dtype=like.dtype).requires_grad_(like.requires_grad)
                for shape, like in zip(shapes, given, strict=True)
            ]
            own = _own(opaque, tensors)
            places = [storage_of(tensor) for tensor in own]
            with no_compile(), _StorageWatch(own) as watch:

                def effects() -> tuple[set[int], bool]:
                    moved = {i for i, t in enumerate(own) if storage_of(t) != places[i]}  # ``t.data = new``
                    return watch.written | moved, watch.random

                return _observed(opaque, own, effects)

    return apart(run)


def observe_real(opaque: Opaque, tensors: Sequence[Tensor]) -> Observed:
    """Run the code on copies of real tensors; generators of random numbers stay as they were."""

    def run() -> Observed:
        with torch.random.fork_rng(devices=[]):
            own = _own(opaque, [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors])
            before = [(t.detach().clone(), t._version) for t in own]
            generator = torch.get_rng_state()

            def effects() -> tuple[set[int], bool]:
                changed = {
                    index
                    for index, (t, (old, version)) in enumerate(zip(own, before, strict=True))
                    if t._version != version or not equal(t, old)
                }
                return changed, not torch.equal(generator, torch.get_rng_state())

            return _observed(opaque, own, effects)

    return apart(run)


def _own(opaque: Opaque, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy the inputs that require gradients, so that the code may write them."""
    inputs = len(tensors) - len(opaque.code.state)
    with torch.enable_grad():
        return [t.clone() if t.requires_grad and i < inputs else t for i, t in enumerate(tensors)]


def _observed(
    opaque: Opaque, own: Sequence[Tensor], effects: Callable[[], tuple[set[int], bool]]
) -> Observed:
    """Run the code. ``effects``: which arguments it wrote, and whether it drew random numbers."""
    with torch.enable_grad():
        output, after = opaque.outputs(own)
    written, random = effects()
    leaves, structure = pytree.tree_flatten(output)
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    own_backward = _has_own_backward(found)
    with opaque.code.holding(own[len(own) - len(opaque.code.state) :]):
        draws_backward = own_backward and (random or _draws_backward(found, own, effects))
    replaced = {i for i, (new, old) in enumerate(zip(after, own, strict=True)) if new is not old}
    return Observed(
        given=tuple(tensor.dtype for tensor in own),
        shapes=tuple(tuple(map(int, t.shape)) for t in found),
        dtypes=tuple(t.dtype for t in found),
        differentiable=tuple(t.requires_grad for t in found),
        tensors=tuple(isinstance(leaf, Tensor) for leaf in leaves),
        others=tuple(leaf for leaf in leaves if not isinstance(leaf, Tensor)),
        structure=structure,
        written=tuple(sorted(written | replaced)),
        random=random or draws_backward,
        own_backward=own_backward,
        draws_backward=draws_backward,
    )


def _has_own_backward(outputs: Sequence[Tensor]) -> bool:
    """Tell whether a backward that is written in Python leads to ``outputs``; those of torch draw nothing."""
    seen: set[Any] = set()
    nodes: list[Any] = [tensor.grad_fn for tensor in outputs]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        seen.add(node)
        nodes += [after for after, _ in node.next_functions]
    return False


def _draws_backward(
    outputs: Sequence[Tensor], own: Sequence[Tensor], effects: Callable[[], tuple[set[int], bool]]
) -> bool:
    """Run backward; tell whether it drew random numbers. One that cannot run here may draw them."""
    results = [tensor for tensor in outputs if tensor.requires_grad]
    trained = [tensor for tensor in own if tensor.requires_grad]
    try:
        torch.autograd.grad(results, trained, list(map(torch.ones_like, results)), allow_unused=True)
    except Exception:  # noqa: BLE001 - the user's code may raise anything on fake tensors
        return True
    return effects()[1]


Point = tuple[int, ...]
"""A number for each variable."""


def points(base: Point) -> list[Point]:
    """Return the sizes to run at: every variable once or twice its own, and all three times; the last is the check."""
    corners = [
        tuple(b * f for b, f in zip(base, factors, strict=True))
        for factors in itertools.product((1, 2), repeat=len(base))
    ]
    return [*corners, tuple(3 * b for b in base)] if base else [()]


def fit(seen: Mapping[Point, int], base: Point) -> OpaqueSize:
    """Return the polynomial, linear in every variable, that gives ``seen``; raises UnfitError if none does."""
    terms: list[tuple[int, tuple[int, ...]]] = []
    indices = range(len(base))
    for chosen in (set(c) for n in range(len(base) + 1) for c in itertools.combinations(indices, n)):
        # Inclusion and exclusion over the corners: the coefficient of the product of the chosen variables, taken from
        # their base, then moved to the origin.
        terms += _moved(chosen, seen, base)
    total: dict[tuple[int, ...], int] = {}
    for coefficient, factors in terms:
        total[factors] = total.get(factors, 0) + coefficient
    size = OpaqueSize(tuple((c, f) for f, c in sorted(total.items()) if c))
    if any(size.of(point) != number for point, number in seen.items()):
        raise UnfitError("a size of its output is no polynomial of its inputs' sizes")
    return size


def _moved(chosen: set[int], seen: Mapping[Point, int], base: Point) -> list[tuple[int, tuple[int, ...]]]:
    """Expand ``slope · Π (x_i - base_i)`` over the chosen variables, with the slope that the corners show."""
    slope = 0
    for size in range(len(chosen) + 1):
        for doubled in itertools.combinations(sorted(chosen), size):
            corner = tuple(b * (2 if i in doubled else 1) for i, b in enumerate(base))
            slope += (-1) ** (len(chosen) - size) * seen[corner]
    if not slope:
        return []
    divisor = math.prod(base[i] for i in chosen)
    if slope % divisor:
        raise UnfitError("a size of its output depends on the numbers in its inputs")
    slope //= divisor
    terms = []
    for size in range(len(chosen) + 1):
        for kept in itertools.combinations(sorted(chosen), size):
            rest = math.prod(-base[i] for i in chosen if i not in kept)
            terms.append((slope * rest, kept))
    return terms
