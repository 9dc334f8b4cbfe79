"""The opaque parts of a model: those named by hand or decorated, and those that turned out to be untraceable."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NoReturn

from torch import nn

from cost_models.errors import ModelError, UsageError
from passes.trace.opaque.cross import OpaqueParts
from passes.trace.opaque.mark import is_marked
from passes.trace.opaque.refused import OPAQUE_ADVICE, PartError, without_slices
from passes.trace.opaque.sizes import Observed
from runtime.ops.opaque import Opaque
from runtime.ops.opaque_code import LOSS, called

logger = logging.getLogger("partitioner")


@dataclass(frozen=True)
class Parts:
    """The opaque parts of a model. ``why``: the reason for each, by the module's path (or ``LOSS``)."""

    model: nn.Module
    loss_fn: Any
    why: Mapping[str, str]
    samples: Mapping[str, Sequence[Sequence[Observed]]] = field(default_factory=dict)
    errors: Mapping[str, PartError] = field(default_factory=dict)
    """The error that made each part opaque."""

    @classmethod
    def chosen(cls, model: nn.Module, loss_fn: Any, patterns: Iterable[str]) -> Parts:
        """Take the modules that ``patterns`` name and those whose class is decorated; of nested ones the outer."""
        modules = dict(model.named_modules())
        why = {path: "its class is decorated" for path, module in modules.items() if is_marked(module)}
        unknown = []
        for pattern in patterns:
            found = [path for path in modules if fnmatchcase(path, pattern)]
            if pattern == "loss" and not found and loss_fn is not None:
                found = [LOSS]
            if not found and pattern != "loss":
                unknown.append(pattern)
            why.update(dict.fromkeys(found, "opaque by request"))
        if unknown or "" in why:
            raise UsageError(
                "opaque names no part of the model",
                [f"no module's path is like {pattern!r}" for pattern in unknown]
                or ["the model itself is no part of it"],
                [f"modules are {', '.join(list(modules)[1:6])}, …", 'opaque=["encoder.*"], or "loss"'],
            )
        return cls(model, loss_fn, _outermost(why))

    def crossing(self) -> OpaqueParts:
        """Make what lets these parts cross a trace."""
        paths = [path for path in self.why if path != LOSS]
        found = OpaqueParts.of(self.model, paths, self.loss_fn, LOSS in self.why)
        found.samples = self.samples
        return found

    def enlarged(self, error: PartError) -> Parts:
        """Make the modules that ``error`` blames opaque, or what encloses them; raises the error where nothing is left."""
        more: dict[str, str] = {}
        errors = dict(self.errors)
        for blamed in error.modules:
            path = blamed if blamed == LOSS else without_slices(blamed, self.model)
            while path and (path in self.why or not self._has_forward(path)) and path != LOSS:
                path = path.rpartition(".")[0]
            root = error.whole and not path and path not in self.why
            if (not path and not root) or path in self.why or (path == LOSS and self.loss_fn is None):
                self.refuse(blamed if error.part is None else error.part, error)
            errors[path] = first = self.errors.get(blamed, error)
            more[path] = first.because[0] if first.because else first.what
        if not more:
            raise error
        for path, why in more.items():
            logger.info("%s becomes one opaque op: %s", self._called(path), why)
        return replace(self, why=_outermost({**self.why, **more}), errors=errors)

    def refuse(self, name: str, error: ModelError) -> NoReturn:
        """Raise ``error``, or what first went wrong with the part: that it cannot be opaque either is said as well."""
        first = self.errors.get(name)
        if first is None:
            raise error
        also = f"{self._called(name)} cannot run as one opaque op: {error.because[-1] if error.because else error.what}"
        ways = dict.fromkeys((*error.suggestions[:1], *first.suggestions))
        ways.pop(OPAQUE_ADVICE, None)  # it is one already
        raise ModelError(first.what, [*first.because, also], list(ways)) from error

    def notes(self, calls: Iterable[Opaque]) -> list[str]:
        """Name every opaque op, with the reason and the line of its code."""
        named: dict[tuple[str, str], list[str]] = {}
        for opaque in calls:
            function = "a custom autograd.Function" if isinstance(opaque.code.target, type) else "decorated"
            why = self.why.get(opaque.name, function)
            names = named.setdefault((opaque.source, why), [])
            if opaque.called not in names:
                names.append(opaque.called)
        return [
            f"{names[0]}{f' (and {len(names) - 1} more)' if len(names) > 1 else ''} runs whole, its own code as one "
            f"opaque op ({source}): {why}"
            for (source, why), names in named.items()
        ]

    def _called(self, name: str) -> str:
        return called(name, dict(self.model.named_modules()).get(name))

    def _has_forward(self, path: str) -> bool:
        """Tell whether the module at ``path`` is called: containers are only read."""
        return path == LOSS or type(self.model.get_submodule(path)).forward is not nn.Module.forward


def _outermost(why: Mapping[str, str]) -> dict[str, str]:
    if "" in why:
        return {"": why[""]}
    return {
        path: reason
        for path, reason in why.items()
        if not any(path.startswith(f"{other}.") for other in why if other != path)
    }
