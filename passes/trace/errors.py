"""An export that failed, told in the user's words: module, file and line, and what to change."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from cost_models.errors import ModelError
from passes.trace.opaque.refused import OPAQUE_ADVICE, PartError
from runtime.ops.opaque_code import LOSS
from runtime.ranks.alone import TRY, WHY
from runtime.user_code import is_users

_MESSAGE_CHARACTERS = 300
_SYMBOL = re.compile(r"\bs\d+\b")
"""The spelling of a batch size that export left open."""


@dataclass(frozen=True)
class _Advice:
    """The words for failures whose message contains one of ``markers``."""

    markers: tuple[str, ...]
    reason: str
    suggestions: tuple[str, ...]


_KNOWN = (
    _Advice(
        (
            "data-dependent",
            "Could not guard",
            "Could not extract specialized",
            "unbacked",
            "_local_scalar_dense",
        ),
        "the code branches on (or takes a size from) numbers that are known only when it runs",
        (
            "choose with torch.where, or with torch.cond for whole branches, instead of a Python if or while",
            "compute Python numbers from shapes or the config, not with .item(), .tolist() or bool(tensor)",
        ),
    ),
    _Advice(
        ("devices cpu, meta", "devices meta, cpu", "device meta is not"),
        "a tensor of the model is on the meta device and is neither a parameter nor a buffer",
        ("self.register_buffer(name, tensor, persistent=False) instead of a plain attribute",),
    ),
    _Advice(
        (
            "to have the same dtype",
            "must have the same dtype",
            "expected scalar type",
            "should be the same",
            "RNN input dtype",
        ),
        "tensors of two data types meet; a precision casts parameters and inputs, not buffers or what forward makes",
        (
            "cast where they meet: buffer.to(x.dtype)",
            "trace (or partition) under torch.autocast instead of precision=Precision(compute=...)",
        ),
    ),
    _Advice(("rocess group has not been initialized", "roup cannot be None"), WHY, (TRY,)),
)
_OTHER = _Advice(
    (),
    "",
    (
        "call the model on example_inputs yourself: if that fails too, the inputs do not fit it",
        "keep NumPy, custom kernels and side effects out of forward: torch.export must see every operation",
    ),
)


def model_error(error: Exception, model: nn.Module, model_name: str) -> ModelError:
    """Make the ModelError for an exception that came out of ``torch.export``; or find it, if it is in there."""
    chain = list(_causes(error))
    ours = next((cause for cause in chain if isinstance(cause, PartError)), None)
    if ours is not None:
        return ours  # raised where torch wraps what is raised
    messages = " ".join(map(str, chain))
    advice = next((known for known in _KNOWN if any(m in messages for m in known.markers)), _OTHER)
    where = next(filter(None, (_location(e, model) for e in chain)), "")
    message = f"{type(error).__name__}: {_first_line(chain[-1])}"
    because = [text for text in (where, message, advice.reason) if text]
    modules = _modules(chain, model)
    suggestions = [*advice.suggestions, *([OPAQUE_ADVICE] if modules else [])]
    return PartError(f"cannot trace {model_name}", because, suggestions, modules)


def _causes(error: BaseException) -> Iterator[BaseException]:
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = (lines[0] if lines else "no message")[:_MESSAGE_CHARACTERS]
    return _SYMBOL.sub("batch", text)


def _modules(chain: Iterable[BaseException], model: nn.Module) -> list[str]:
    """Return the path of the innermost module whose code failed; the loss function's name if it did."""
    paths = {id(module): path for path, module in model.named_modules()}
    for error in chain:
        module = None
        for frame, _ in traceback.walk_tb(error.__traceback__):
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in paths:
                module = paths[id(owner)]
            elif frame.f_code.co_name == "loss_and_metrics":
                module = LOSS
        if module is not None:
            return [module]
    return []


def _location(error: BaseException, model: nn.Module) -> str:
    """Describe where the model's code failed: the innermost module, and the innermost line that is not torch's or ours.

    For example: in module 'encoder.0' (Router), model.py:17: if x.sum() > 0:
    """
    paths = {id(module): path for path, module in model.named_modules()}
    line = module = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in paths:
            module = paths[id(owner)]
        if is_users(code.co_filename):
            line = traceback.FrameSummary(code.co_filename, number, code.co_name)
    parts = []
    if module is not None:
        name = type(model.get_submodule(module)).__name__
        parts.append(f"in module {module!r} ({name})" if module else f"in {name}.forward")
    if line is not None:
        parts.append(f"{line.filename}:{line.lineno}: {line.line}")
    return ", ".join(parts)
