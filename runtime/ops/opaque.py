"""Opaque ops: a part of the model that runs the user's own code as it is, forward and backward, as one node of a graph.

    node      opaque_encoder_ctc = opaque(encoder.ctc)(inputs …, parameters …, buffers …)      flat tensors in
    result    (outputs …, new contents of what the code wrote)                                  flat tensors out

The code is a module without tensors, a function, or a ``torch.autograd.Function``. Parameters and buffers are arguments, so
placement, gradients, optimizers and checkpoints treat them as they treat those of any other op; autograd runs through
the code, the user's own backward included. On fake tensors the node tells shapes, by rules that were measured when the
model was traced: a size is a polynomial of the inputs' sizes.
"""

from __future__ import annotations

import contextlib
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

from cost_models.compute import OpClass
from cost_models.errors import ModelError
from runtime.ops.opaque_code import Code, called
from runtime.ops.random import generators_of, seeded
from runtime.ranks.alone import alone

ContextMaker: TypeAlias = Callable[[], AbstractContextManager[Any]]
"""A picklable maker of a context within which the code runs."""


@dataclass(frozen=True)
class Slot:
    """A tensor among the arguments, by its place among the node's."""

    index: int


@dataclass(frozen=True)
class Baked:
    """An argument that is no tensor: its value when the model was traced."""

    value: Any


@dataclass(frozen=True)
class Tree:
    """A container of the user's arguments: how ``torch.utils._pytree`` makes it of its items. None is a leaf."""

    kind: Any
    context: Any
    items: tuple[Tree | None, ...]

    @classmethod
    def of(cls, structure: pytree.TreeSpec) -> Tree | None:
        """Take a TreeSpec apart: those of torch warn when they are pickled."""
        if structure.is_leaf():
            return None
        return cls(structure.type, structure.context, tuple(map(cls.of, structure.children())))

    def filled(self, leaves: Iterator[Any]) -> Any:
        """Return the container with ``leaves``."""
        items = [next(leaves) if item is None else item.filled(leaves) for item in self.items]
        return pytree.SUPPORTED_NODES[self.kind].unflatten_fn(items, self.context)


@dataclass(frozen=True)
class SizeVariable:
    """A number that is free when the node runs: a size of one tensor, divided."""

    tensor: int
    dim: int
    divisor: int = 1


@dataclass(frozen=True)
class OpaqueSize:
    """A number that follows from the variables: the sum of each coefficient times the product of its variables."""

    terms: tuple[tuple[int, tuple[int, ...]], ...]

    def of(self, numbers: Sequence[Any]) -> Any:
        """Return the number (symbolic if the variables are)."""
        return sum(
            coefficient * math.prod(numbers[v] for v in factors) for coefficient, factors in self.terms
        )


@dataclass(frozen=True)
class OpaqueResult:
    """One tensor that the node returns."""

    shape: tuple[OpaqueSize, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Measured:
    """The work of one run of a part. ``numbers``: its open sizes then."""

    numbers: tuple[int, ...]
    counts: tuple[float, ...]
    """Forward FLOPs, bytes and kernels, the same of backward, bytes kept for backward besides arguments and results."""
    saved: tuple[int, ...]
    """The arguments that are kept for backward."""
    op_class: OpClass
    uncounted: tuple[str, ...] = ()
    """Its kernels that may do arithmetic which nobody counts."""


@dataclass(frozen=True, eq=False)
class Opaque:
    """One part of the model, called with flat tensors: inputs, then its code's state.

    ``name``: the part, such as ``encoder.ctc``. ``text``: what a fingerprint covers: the same in every process.
    ``identity``: equal for parts that are analysed once for all; ``arguments`` and ``structure``: how the code's own
    arguments are put together. ``written``: arguments whose new contents follow the outputs.
    """

    name: str
    source: str
    """The line of the user's code, such as ``model.py:12``."""
    code: Code
    arguments: tuple[Slot | OpaqueSize | Baked, ...]
    structure: Tree
    variables: tuple[SizeVariable, ...]
    results: tuple[OpaqueResult, ...]
    written: tuple[int, ...]
    random: bool
    """True if the code draws random numbers, forward or backward."""
    autocast: torch.dtype | None
    """The type of the autocast that the code was called under."""
    text: str
    identity: str
    measured: tuple[Measured, ...] = ()
    """Runs on real tensors, of a part that runs on no others."""
    modes: tuple[ContextMaker, ...] = ()
    """Contexts around the code, in forward and in backward."""
    own_backward: bool = False
    """True if a backward of the user's own is inside it: what that may read from the module is there then."""
    draws_backward: bool = False
    """True if its backward may draw random numbers: from a seed that forward draws, alike on every copy."""

    def __post_init__(self) -> None:
        # Graphs name their nodes and functions by these.
        name = "opaque_" + "".join(c if c.isalnum() else "_" for c in self.name)
        for attribute, value in (("__name__", name), ("__qualname__", name), ("__module__", __name__)):
            object.__setattr__(self, attribute, value)

    def __str__(self) -> str:
        return f"opaque({self.name or 'the model'})"

    @property
    def called(self) -> str:
        """The part's name in a sentence."""
        return called(self.name, self.code.target)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def within(self, mode: ContextMaker, name: str) -> Opaque:
        """Return the op with its code inside one more context."""
        return replace(self, modes=(*self.modes, mode), identity=f"{self.identity}/{name}")

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Run the code; on tensors without values only tell the shapes."""
        if any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
            return self.shapes(tensors)
        return self.run(tensors)

    def shapes(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return empty tensors of the results' shapes."""
        numbers = self.numbers(tensors)
        device = tensors[0].device
        return tuple(
            torch.empty([size.of(numbers) for size in result.shape], dtype=result.dtype, device=device)
            for result in self.results
        )

    def numbers(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Return the variables of a call with ``tensors``."""
        return [tensors[v.tensor].shape[v.dim] // v.divisor for v in self.variables]

    def run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Run the code on whatever the tensors are."""
        if not (self.modes or self.own_backward or self.draws_backward):
            results = self._run(tensors)
        elif torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            results = tuple(_Apart.apply(self, *tensors))  # type: ignore[no-untyped-call]
        else:
            with self._modes():
                results = self._run(tensors)
        self._check(tensors, results)
        return results

    def _run(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        own = [t.clone() if index in self.written else t for index, t in enumerate(tensors)]
        outputs, after = self.outputs(own)
        given = {_storage(tensor) for tensor in own}
        found = [t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor)]
        results = [t.clone() if _storage(t) in given else t.contiguous() for t in found]
        return (*results, *(after[index] for index in self.written))

    def outputs(self, tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """Return the code's own output, and every argument as the code left it."""
        numbers = self.numbers(tensors)

        def filled(leaf: Slot | OpaqueSize | Baked) -> Any:
            if isinstance(leaf, Slot):
                return tensors[leaf.index]
            return leaf.of(numbers) if isinstance(leaf, OpaqueSize) else leaf.value

        args, kwargs = self.structure.filled(map(filled, self.arguments))
        first = len(tensors) - len(self.code.state)
        try:
            with self._autocast(tensors[0].device.type):
                output, state = self.code.call(tensors[first:], args, kwargs)
        except Exception as error:
            error.add_note(
                f"This is the opaque part {self.called} ({self.source}). Its code came here without having been "
                "constructed here: what reads a global table that only its constructor fills fails in other processes."
            )
            raise
        return output, [*tensors[:first], *state]

    def _autocast(self, device_type: str) -> AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device_type, dtype=self.autocast)

    @contextlib.contextmanager
    def _modes(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(mode())
            yield

    def _check(self, tensors: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        numbers = self.numbers(tensors)
        expected = [(tuple(size.of(numbers) for size in r.shape), r.dtype) for r in self.results]
        found = [(tuple(result.shape), result.dtype) for result in results]
        if expected != found:
            raise ModelError(
                f"the opaque part {self.called} returned other tensors than when it was traced",
                [f"it returned {found}, traced were {expected} ({self.source})"],
                [
                    "return tensors whose sizes follow from the inputs' sizes",
                    "opaque=[a larger module], inside which such sizes stay",
                ],
            )


class _Apart(torch.autograd.Function):
    """Runs an opaque part in an autograd graph of its own: its backward runs inside its modes, under a seed of its own."""

    @staticmethod
    def forward(ctx: Any, opaque: Opaque, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
        with torch.enable_grad(), opaque._modes():
            results = opaque._run(leaves)
        ctx.opaque, ctx.leaves, ctx.results = opaque, leaves, results
        ctx.seed = int(torch.randint(2**62, ())) if opaque.draws_backward else None
        detached = tuple(result.detach() for result in results)
        ctx.mark_non_differentiable(
            *(d for d, r in zip(detached, results, strict=True) if not r.requires_grad)
        )
        return detached

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        given = [
            (r, g) for r, g in zip(ctx.results, gradients, strict=True) if r.requires_grad and g is not None
        ]
        trained = [leaf for leaf in ctx.leaves if leaf.requires_grad]
        generators = generators_of(gradients[0].device)
        drawing = contextlib.nullcontext() if ctx.seed is None else seeded(generators, ctx.seed)
        state = ctx.leaves[len(ctx.leaves) - len(ctx.opaque.code.state) :]
        with alone(), ctx.opaque._modes(), drawing, ctx.opaque.code.holding(state):
            found = torch.autograd.grad(
                [r for r, _ in given], trained, [g for _, g in given], allow_unused=True
            )
        remaining = iter(found)
        return None, *(next(remaining) if leaf.requires_grad else None for leaf in ctx.leaves)


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def no_compile() -> Iterator[None]:
    """Let no code compile itself, as torch.cond does: on fake tensors that fails, and the failure would be remembered."""
    original = torch.compile

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("code that compiles itself runs on real tensors only")

    torch.compile = refuse
    try:
        yield
    finally:
        torch.compile = original


def refuse_unportable(opaque: Opaque) -> None:
    """Raise ModelError for a part whose code cannot go to another process."""
    try:
        pickle.dumps(opaque)
    except Exception as error:
        raise ModelError(
            f"the opaque part {opaque.called} cannot go to another process",
            [
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'} ({opaque.source})"
            ],
            [
                "define its classes, functions and hooks in a module, by name: no lambdas, nothing inside functions"
            ],
        ) from error
