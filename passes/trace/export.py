"""One module of model and loss, exported: flat tensors in, ``(loss, metrics..., outputs...)`` out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias
from unittest import mock

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses import FakeTensorMode
from torch.distributed._functional_collectives import traceable_collective_remaps
from torch.export import Dim, ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from cost_models.errors import ModelError
from cost_models.precision import Precision
from passes.interrupts import interrupt_waits
from passes.trace.batch import flatten_batch, forward_arguments, map_tensors

LossFunction: TypeAlias = Callable[[Any, Any], Any]
"""``loss_fn(output, batch)`` returns the loss, or ``(loss, {"name": metric})``: see ``checked_loss``."""


@dataclass
class OutputRecord:
    """The outputs that ``ModelWithLoss.forward`` returned, known once it ran.

    An object of its own because export undoes every attribute that a module assigns while it is traced.
    """

    names: tuple[str, ...] = ()
    kinds: tuple[Literal["loss", "metric", "output"], ...] = ()
    """The kind of each of ``names``."""
    changed: tuple[str, ...] = ()
    """Python numbers of modules that forward changed, as "name: before -> after": a graph keeps the first."""


class ModelWithLoss(nn.Module):
    """Calls ``model`` on the batch rebuilt from its leaves, and the loss on top.

    ``forward`` returns ``(loss, *metrics)`` when training, else ``(loss if there is one, *metrics, *outputs)``;
    ``record`` tells what they are once it ran.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: object,
        loss_fn: LossFunction | None,
        training: bool,
        precision: Precision | None = None,
        *,
        assignments_as_writes: bool = True,
    ) -> None:
        """``assignments_as_writes``: within ``forward``, for a trace; a caller that runs backward writes after it."""
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        # In a tuple, so that neither the batch nor its tensors become state of this module.
        self._batch = (batch,)
        self._with_outputs = not training
        self._casts_to = None if precision is None else precision.casts_to
        self._assignments_as_writes = assignments_as_writes
        self._autocasts = _autocasts_around()
        self.record = OutputRecord()

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Run the traced computation, under the autocast in which this module was made."""
        with contextlib.ExitStack() as autocasts:
            for device_type, dtype in self._autocasts:
                autocasts.enter_context(torch.autocast(device_type, dtype=dtype))
            return self._run(leaves)

    def _run(self, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
        batch = rebuild(self._batch[0], leaves)
        args, kwargs = forward_arguments(self.model, batch, self.loss_fn is not None)
        if self._casts_to is not None:
            args, kwargs = cast_floating((args, kwargs), self._casts_to)
        before = _python_numbers(self.model)
        writes = (
            writes_for_assignments(self.model) if self._assignments_as_writes else contextlib.nullcontext()
        )
        with writes, products_in(self._casts_to):
            output = self.model(*args, **kwargs)
        after = _python_numbers(self.model)
        self.record.changed = tuple(
            f"{name}: {value} -> {after[name]}"
            for name, value in before.items()
            if name in after and type(after[name]) is type(value) and after[name] != value == value
        )
        judged = output
        if self.loss_fn is not None and self._casts_to is not None and self._casts_to.itemsize < 4:
            judged = cast_floating(output, torch.float32)  # as autocast computes losses
        loss, metrics = loss_and_metrics(judged, batch, self.loss_fn, required=not self._with_outputs)
        found: list[tuple[Literal["loss", "metric", "output"], str, Tensor]] = []
        if loss is not None:
            found.append(("loss", "loss", loss))
        # Cut off from autograd, so that nothing is kept for a backward that never comes.
        found += [("metric", name, metric.detach()) for name, metric in metrics.items()]
        if self._with_outputs:
            named = _named_outputs(output).items()
            found += [("output", name, tensor) for name, tensor in named if tensor is not loss]
        self.record.kinds = tuple(kind for kind, _, _ in found)
        self.record.names = tuple(name for _, name, _ in found)
        return tuple(tensor for _, _, tensor in found)


def _autocasts_around() -> tuple[tuple[str, torch.dtype], ...]:
    """List the autocasts that are on, as (device type, low precision).

    Within the traced module they become regions whose casts the graph shows (``passes.trace.normal.autocast``); around the
    export they would cast unseen, and the graph's ops would have operands of types that no kernel takes together.
    """
    kinds = ("cpu", "cuda")
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    with contextlib.ExitStack() as off:
        for device_type, _ in _autocasts_around():
            off.enter_context(torch.autocast(device_type, enabled=False))
        yield


def _python_numbers(model: nn.Module) -> dict[str, int | float]:
    """Return the numbers that modules keep as plain attributes, by path."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) in (bool, int, float)
    }


@contextlib.contextmanager
def writes_for_assignments(model: nn.Module) -> Iterator[None]:
    """Turn ``self.buffer = new`` into ``self.buffer.copy_(new)``: export forgets the one and sees the other."""
    before = [
        (path, module._buffers, name, buffer)
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    yield
    for path, table, name, old in before:
        new = table.get(name)
        if new is None or new is old:
            continue
        if new.shape != old.shape:
            raise ModelError(
                f"forward replaces the buffer {f'{path}.{name}'.lstrip('.')} by one of another shape",
                [f"from {tuple(old.shape)} to {tuple(new.shape)}"],
                ["compute it anew in forward, or keep a buffer of the largest shape and slice it"],
            )
        with torch.no_grad():
            old.copy_(new)
        table[name] = old


def cast_floating(structure: object, dtype: torch.dtype) -> Any:
    """Rebuild the structure with its floating-point tensors in ``dtype``."""
    return map_tensors(
        structure, lambda _, tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor
    )


def rebuild(batch: object, leaves: Sequence[Tensor]) -> Any:
    """Rebuild the batch in the user's own structure, with ``leaves`` for its tensors."""
    remaining: Iterator[Tensor] = iter(leaves)
    return map_tensors(batch, lambda path, old: next(remaining))


def _named_outputs(output: object) -> dict[str, Tensor]:
    if isinstance(output, Tensor):
        return {"output": output}
    if isinstance(output, Mapping):
        return flatten_batch(output)
    return {name.replace("batch.", "output.", 1): t for name, t in flatten_batch(output).items()}


def loss_and_metrics(
    output: object, batch: Any, loss_fn: LossFunction | None, *, required: bool = True
) -> tuple[Tensor | None, Mapping[str, Tensor]]:
    """Return the loss of what a model returned, and the metrics beside it by name (none without ``loss_fn``).

    The loss is None only where it is not ``required`` and the model's own output has none.
    """
    if loss_fn is None:
        return loss_of(output, required), {}
    returned = loss_fn(output, batch)
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping):
        return checked_loss(returned[0]), checked_metrics(returned[1])
    return checked_loss(returned), {}


def checked_metrics(metrics: Mapping[Any, object]) -> Mapping[str, Tensor]:
    """Return ``metrics`` if each is one real number under a name, else raise a ModelError that lists all that are not."""
    problems = []
    for name, metric in metrics.items():
        if not isinstance(name, str) or not name:
            problems.append(f"the metric {name!r} is not named by a word")
        elif name == "loss":
            problems.append("a metric is called 'loss', which is the loss's own name")
        elif not isinstance(metric, Tensor):
            problems.append(
                f"metric {name!r} is a {type(metric).__name__}, which the trace would keep for good"
            )
        elif metric.dim() != 0 or metric.is_complex():
            problems.append(f"metric {name!r} is a tensor of shape {tuple(metric.shape)} and {metric.dtype}")
    if problems:
        raise ModelError(
            "loss_fn returns metrics that cannot be aggregated",
            problems,
            ['return (loss, {"name": metric}) with 0-dim tensors: metric.mean(), not metric.mean().item()'],
        )
    return {str(name): metric for name, metric in metrics.items() if isinstance(metric, Tensor)}


def checked_loss(loss: object) -> Tensor:
    """Return ``loss`` if it is one floating-point number, else raise a ModelError.

    ``loss_fn`` may return ``(loss, {"name": 0-dim tensor})`` as well. Such metrics are computed per micro-batch and
    aggregated like the loss: under ``loss_reduction="mean"`` by samples, under "sum" summed, under "token_mean" by the
    valid tokens of each micro-batch (``passes.trace.loss.reduction``).
    """
    if isinstance(loss, Tensor) and loss.dim() == 0 and loss.is_floating_point():
        return loss
    got = (
        f"a tensor of shape {tuple(loss.shape)} and {loss.dtype}"
        if isinstance(loss, Tensor)
        else repr(type(loss))
    )
    raise ModelError(
        "loss_fn does not return a loss",
        [f"a loss is one floating-point number; got {got}"],
        ["return loss.mean()", 'return (loss, {"name": metric}) to have metrics beside it'],
    )


def loss_of(output: object, required: bool) -> Tensor | None:
    """Find the loss inside a model's own output: ``.loss``, ``["loss"]``, a tuple's first element, or the output itself."""
    found: object = None
    if isinstance(output, Tensor):
        found = output
    elif isinstance(output, Mapping):
        found = output.get("loss")
    elif isinstance(getattr(output, "loss", None), Tensor):
        found = output.loss  # type: ignore[attr-defined]
    elif isinstance(output, list | tuple) and output:
        found = output[0]
    if isinstance(found, Tensor) and found.dim() == 0 and found.is_floating_point():
        return found
    if not required:
        return None
    got = (
        _describe(output)
        if found is None or found is output
        else f"{type(output).__name__} with {_describe(found)}"
    )
    raise ModelError(
        "the model returns no loss",
        [
            f"forward returned {got}",
            "without loss_fn, the loss must be the output itself (a scalar), its .loss, its ['loss'] or the "
            "first element of a tuple",
        ],
        ["pass loss_fn(output, batch)", "give a Hugging Face model its labels in example_inputs"],
    )


def _describe(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def export(
    module: ModelWithLoss,
    leaves: Mapping[str, Tensor],
    symbolic: Mapping[str, frozenset[int]],
    fake_mode: FakeTensorMode,
) -> ExportedProgram:
    """Export with the dimensions in ``symbolic`` left open if the model's code leaves them open."""
    shapes = tuple(dict.fromkeys(sorted(symbolic[name]), Dim.AUTO) for name in leaves)
    # A collective is to say that there is no group (``runtime.ranks.alone``), before torch puts another in its place.
    collectives = mock.patch.dict(traceable_collective_remaps, clear=True)
    with interrupt_waits(), tracing(TracingContext(fake_mode)), _no_autocast(), collectives:
        program = torch.export.export(
            module, tuple(leaves.values()), dynamic_shapes=(shapes,) if shapes else None, strict=False
        )
    # torch's pass over no_grad regions forgets a reader of a value whose other readers are in the region.
    for node in program.graph.nodes:
        for source in node.all_input_nodes:
            source.users.setdefault(node)
    return program


PRODUCTS = frozenset(
    {"linear", "matmul", "rmatmul", "mm", "bmm", "addmm", "addbmm", "baddbmm", "einsum"}
    | {f"conv{transposed}{n}d" for transposed in ("", "_transpose") for n in (1, 2, 3)}
    | {"scaled_dot_product_attention"}
)
"""Names of functions and ops, without underscores, whose operands must have one type and that autocast casts."""


def products_in(compute: torch.dtype | None) -> AbstractContextManager[Any]:
    """Cast products of unlike types to ``compute``; a context that changes nothing for None, or for 32 bits and more.

    A precision casts parameters and inputs. A buffer, or what forward makes of one, may be float32 still, and no kernel
    multiplies it with bfloat16. Such a call alone runs under ``torch.autocast`` for the type that is computed in, in traces
    and in eager code:

        linear(x: bfloat16, w: float32)     ─►     linear(x, w.to(bfloat16))       torch's own lists say to what
        add(x: bfloat16, b: float32)        ─►     itself: types are promoted
    """
    return nullcontext() if compute is None or compute.itemsize >= 4 else _ProductsIn(compute)


class _ProductsIn(TorchFunctionMode):
    def __init__(self, compute: torch.dtype) -> None:
        super().__init__()
        self.compute = compute

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if getattr(func, "__name__", "").strip("_") in PRODUCTS:
            tensors = [leaf for leaf in pytree.tree_leaves((args, options)) if isinstance(leaf, Tensor)]
            if len({t.dtype for t in tensors if t.is_floating_point()}) > 1:
                with torch.autocast(tensors[0].device.type, dtype=self.compute):
                    return func(*args, **options)
        return func(*args, **options)
