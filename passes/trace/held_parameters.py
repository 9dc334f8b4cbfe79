"""Parameters that code reads from elsewhere than their module: a list of them, or a closure of the loss function.

    self.decayed = [self.a.weight]; … sum((w**2).sum() for w in self.decayed)

While a model is traced its modules hold stand-ins, and export takes any other tensor for a constant: the gradient of the
penalty would be lost. Within this mode the module's stand-in is read instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from cost_models.errors import ModelError
from runtime.user_code import caller

_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


class HeldParameters(TorchFunctionMode):
    """A mode in which every parameter of ``model`` is what its module has at the time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._places: dict[int, tuple[nn.Parameter, Mapping[str, Any], str]] = {}
        """The tables in which parameters stand, by the parameters' ``id``; the parameters live as long."""
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self._places.setdefault(id(parameter), (parameter, module._parameters, name))

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        current = [self._current(argument) for argument in args]
        if func == _SET_DATA:
            return _written(*current)
        if func == _GET_DATA:
            func = Tensor.detach  # the same memory; read as it is, it would be a constant of the graph
        if not kwargs:  # most calls ask a tensor's sizes, and a trace makes tens of thousands of them
            return func(*current)
        return func(*current, **{name: self._current(value) for name, value in kwargs.items()})

    def _current(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(self._current(item) for item in value)
        place = self._places.get(id(value))
        return value if place is None else place[1].get(place[2], value)


def _written(tensor: Tensor, new: Tensor) -> None:
    """Write for ``tensor.data = new``, which export would forget."""
    if tensor.shape != new.shape or tensor.dtype != new.dtype:
        raise ModelError(
            f"forward gives the data of a tensor another shape or type, in {caller()}",
            [f"{tuple(tensor.shape)} of {tensor.dtype} becomes {tuple(new.shape)} of {new.dtype}"],
            ["make another tensor in forward, and leave this one as it is"],
        )
    tensor.detach().copy_(new)
