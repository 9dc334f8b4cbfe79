"""The state a model is put into while it is traced, and how it gets out of it unchanged.

Each context manager changes one thing and restores exactly what it found, also after an error.
"""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributions import Distribution
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from cost_models.precision import Precision
from passes.graph.nodes import storage_key
from passes.trace.hook_reads import hooks_of
from passes.trace.names import own_dtype_parameters
from runtime.user_code import caller, innermost_module


def export_fake_mode() -> FakeTensorMode:
    """Make a fake mode as ``torch.export`` does; ours, so that meta parameters can join it as CPU tensors."""
    return FakeTensorMode(
        shape_env=ShapeEnv(tracked_fakes=[], trace_asserts=True), allow_non_fake_inputs=True, export=True
    )


def fake_twin(fake_mode: FakeTensorMode, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Make a fake tensor of the same sizes and strides; on the CPU for a meta tensor: no memory, but CPU code paths."""
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    with fake_mode:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype, device=device)


@contextlib.contextmanager
def state_as_traced(
    model: nn.Module, fake_mode: FakeTensorMode, precision: Precision
) -> Iterator[Mapping[str, Tensor]]:
    """Swap meta parameters and buffers for fake CPU ones, and parameters for fake ones of the type they compute in.

    A meta trace would bake ``device=meta`` into the graph and lose the data of ``torch.tensor([...])``.
    Ties stay ties, and what shares memory on the meta device shares it in the fakes. So that this holds for plain
    attributes as well, those that are views of other meta tensors are swapped too: yields them by name.
    Other tensors stay as they are: export fakes them itself, without a copy.
    """
    keep = own_dtype_parameters(model)
    fakes: dict[int, Tensor] = {}
    storages: dict[int | None, Tensor] = {}
    attributes: dict[str, Tensor] = {}
    undo: list[tuple[dict[str, Any], str, Tensor]] = []

    def traced_dtype(tensor: Tensor) -> torch.dtype:
        if not isinstance(tensor, nn.Parameter):
            return tensor.dtype
        return precision.of(tensor.dtype, keeps_dtype=id(tensor) in keep).leaf

    def has_stand_in(tensor: Tensor) -> bool:
        """Tell whether export cannot fake ``tensor`` itself: a view that carries gradients to a cast parameter, too."""
        owner = tensor._base if tensor.requires_grad else None
        return (
            tensor.is_meta
            or traced_dtype(tensor) != tensor.dtype
            or (owner is not None and traced_dtype(owner) != owner.dtype)
        )

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            twin = fake_twin(fake_mode, tensor, traced_dtype(tensor))
            if tensor.is_meta and traced_dtype(tensor) == tensor.dtype:
                twin = in_same_memory(tensor, twin)
            is_parameter = isinstance(tensor, nn.Parameter)
            # A view that was taken with autograd on carries gradients to its owner.
            has_gradient = tensor.requires_grad
            fakes[id(tensor)] = (
                nn.Parameter(twin, has_gradient) if is_parameter else twin.requires_grad_(has_gradient)
            )
        return fakes[id(tensor)]

    def in_same_memory(tensor: Tensor, twin: Tensor) -> Tensor:
        """Return a twin over the memory of the first twin of this storage, which ends where the storage does."""
        key = storage_key(tensor)
        if key is None:
            return twin
        if key not in storages:
            if tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes():
                storages[key] = twin
                return twin
            elements = tensor.untyped_storage().nbytes() // tensor.itemsize
            with fake_mode:
                storages[key] = torch.empty(elements, dtype=tensor.dtype, device="cpu")
        memory = storages[key]
        if memory.dtype != tensor.dtype:
            return twin
        with fake_mode, torch.no_grad():
            return memory.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

    try:
        for path, module in model.named_modules():
            tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            for table in tables:
                for name, tensor in table.items():
                    if tensor is not None and has_stand_in(tensor):
                        undo.append((table, name, tensor))
                        table[name] = fake(tensor)
            for name, value in list(vars(module).items()):
                if isinstance(value, Tensor) and has_stand_in(value):
                    undo.append((vars(module), name, value))
                    attributes[f"{path}.{name}".lstrip(".")] = value
                    vars(module)[name] = fake(value)
        yield attributes
    finally:
        for table, name, tensor in undo:
            table[name] = tensor


@contextlib.contextmanager
def torch_quiet() -> Iterator[None]:
    """Keep torch's own reports of a failed export (warnings, log records, whole graphs on stderr) to our
    debug log.

    The error that the user gets says the same in five lines.
    """
    names = [name for name in logging.root.manager.loggerDict if name == "torch" or name.startswith("torch.")]
    heard = [log for log in map(logging.getLogger, names) if not log.disabled]
    said = io.StringIO()
    for log in heard:
        log.disabled = True
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(said):
            warnings.simplefilter("ignore")
            yield
    finally:
        for log in heard:
            log.disabled = False
        if said.getvalue():
            logging.getLogger("partitioner").debug("while tracing: %s", said.getvalue())


@contextlib.contextmanager
def distributions_unchecked() -> Iterator[None]:
    """Let ``torch.distributions`` not look at the values they are given, a branch on numbers; torch.compile does too."""
    checked = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(checked)


@contextlib.contextmanager
def training_mode(model: nn.Module, training: bool, notes: list[str]) -> Iterator[None]:
    """Call ``model.train(training)``, which a model may override; afterwards every module's own flag is as it was.

    Notes the modules that were in evaluation mode inside a model that trains: frozen on purpose, or just loaded so.
    """
    before = [(module, module.training) for module in model.modules()]
    try:
        model.train(training)
        _note_roused(model, dict(before), notes)
        yield
    finally:
        for module, flag in before:
            module.training = flag


def _note_roused(model: nn.Module, before: Mapping[nn.Module, bool], notes: list[str]) -> None:
    if not before[model]:
        return
    roused = [name for name, module in model.named_modules() if module.training and not before[module]]
    if roused:
        more = f" and {len(roused) - 3} more" if len(roused) > 3 else ""
        notes.append(
            f"{', '.join(roused[:3])}{more}: in evaluation mode in the model, in training mode in the plan, as after "
            "model.train(); a model that overrides train() keeps what it freezes frozen"
        )


@contextlib.contextmanager
def caching_off(model: nn.Module, notes: list[str]) -> Iterator[None]:
    """Set ``config.use_cache = False`` wherever a Hugging Face module has it on: cache objects do not export."""
    configs = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        for item in (config, *getattr(config, "__dict__", {}).values()):
            if getattr(item, "use_cache", None) is True:
                configs[id(item)] = item
    if configs:
        notes.append(
            "use_cache was switched off for tracing (key-value caches are for generation, not training)"
        )
    try:
        for config in configs.values():
            config.use_cache = False
        yield
    finally:
        for config in configs.values():
            config.use_cache = True


NOT_RUN = "hooks on gradients are not run"
"""The beginning of the note on hooks that a plan has no place for."""
HOOKS_RUN = "hooks on parameters' gradients run once per step"
"""The beginning of the note on hooks that a plan runs."""


@contextlib.contextmanager
def watch_gradient_hooks(model: nn.Module, notes: list[str], opaque: Collection[str]) -> Iterator[None]:
    """Note hooks on gradients: the traced graph has no place for them, so a plan runs without, but for parameters' own.

    ``opaque``: the modules that run whole, known at the end: hooks in them are run.
    """
    seen: list[tuple[str, str]] = []
    original, thread = Tensor.register_hook, threading.get_ident()

    def register_hook(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        if threading.get_ident() == thread:  # opaque parts are tried in another
            seen.append((innermost_module(model) or "", f"a tensor in {caller()}"))
        return original(tensor, hook)  # type: ignore[no-untyped-call]

    with mock.patch.object(Tensor, "register_hook", register_hook):
        yield
    seen += [
        (path, f"module {path or '(root)'}")
        for path, module in model.named_modules()
        if module._backward_hooks or module._backward_pre_hooks
    ]
    lost = dict.fromkeys(
        text for path, text in seen if not any(f"{path}.".startswith(f"{part}.") for part in opaque)
    )
    if lost:
        notes.append(f"{NOT_RUN}: {_first_three(list(lost))}")
    hooked = [name for name, parameter in model.named_parameters() if hooks_of(parameter)]
    if hooked:
        notes.append(f"{HOOKS_RUN}, on the whole batch's gradient: {_first_three(hooked)}")


def _first_three(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextlib.contextmanager
def watch_checkpointing(model: nn.Module, seen: list[str]) -> Iterator[None]:
    """Say into ``seen`` when activations would be recomputed: export drops ``torch.utils.checkpoint`` without a trace."""

    def recording(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append("torch.utils.checkpoint was called")
            return original(*args, **kwargs)

        return call

    def plain(run_function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
        """Compute what the reentrant form does; its own forward runs without gradients, which a trace would believe."""
        return run_function(*args)

    frame = torch.utils.checkpoint._CheckpointFrame
    reentrant = torch.utils.checkpoint.CheckpointFunction
    # Patched below the public function, which most models have imported by name: the frame is made under every name
    # that torch 2.11 to 2.14 give to what surrounds it.
    with (
        mock.patch.object(torch.utils.checkpoint, frame.__name__, recording(frame)),
        mock.patch.object(reentrant, "apply", recording(plain)),
    ):
        yield
    modules = [
        path
        for path, module in model.named_modules()
        if getattr(module, "gradient_checkpointing", False) is True
    ]
    if modules:
        seen.append(
            "gradient checkpointing is enabled" + (f" in {modules[0]!r}" if modules and modules[0] else "")
        )
