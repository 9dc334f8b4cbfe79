"""Count the bytes of tensors alive: what "peak memory" of a CPU worker means in this project.

Every storage counts once, with its full size, from the operation that makes it until nothing refers to it
any more. Python, libraries and what operations use inside are not counted. For measuring only: a dispatch
mode slows every operation down.

    with AliveBytes(model.parameters()) as alive:
        executor.train_step(batch, microbatches)
    alive.peak_bytes
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AliveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks ``current_bytes`` and ``peak_bytes`` of tensors on ``device_type`` while it is active.

    ``known``: tensors that live already and count from the start (parameters, gradients, optimizer state).
    ``ignored``: tensors whose memory never counts, nor that of their views (a batch that the caller holds).
    """

    def __init__(
        self,
        known: Iterable[torch.Tensor] = (),
        device_type: str = "cpu",
        *,
        ignored: Iterable[torch.Tensor] = (),
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device_type = device_type
        self.current_bytes = 0
        self.peak_bytes = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._ignored = {tensor.untyped_storage()._cdata: tensor for tensor in ignored}
        """By storage; held, so that no other storage gets the address."""
        for tensor in known:
            self._count(tensor)

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        if tensor.device.type != self.device_type:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._alive or key in self._ignored:
            return
        size_bytes = storage.nbytes()

        def ended(_: object) -> None:
            self._alive.pop(key, None)
            self.current_bytes -= size_bytes

        self._alive[key] = weakref.ref(storage, ended)
        self.current_bytes += size_bytes
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
