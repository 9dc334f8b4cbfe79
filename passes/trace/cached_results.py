"""Results that Python keeps of functions (``functools.lru_cache``, ``functools.cache``), and forgetting new ones.

A function that forward calls while it is traced leaves tensors without values in its cache; in float64, wide ones. No
single result can be taken out of such a cache, so one with new results is emptied: the function computes them again.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from passes.trace.noted import Change, Noted

_TOOLS = frozenset(sys.stdlib_module_names) | {"torch", "sympy", "mpmath", "triton"}
_TOOLS |= {"cost_models", "partitioner", "passes", "runtime"}
"""Packages whose caches hold no tensors."""


class Cached(Noted):
    """A function with a cache of its results."""

    def __init__(self, found: functools._lru_cache_wrapper[Any]) -> None:
        code = getattr(found.__wrapped__, "__code__", None)
        where = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""
        super().__init__(f"the cache of {found.__wrapped__.__qualname__}{where}", found)
        self.computed, self.size = found.cache_info().misses, found.cache_info().currsize

    def restore(self) -> None:
        if self._has_new():
            self.found.cache_clear()
            self.computed, self.size = 0, 0

    def changes(self) -> Iterator[Change]:
        if self._has_new():
            now = self.found.cache_info().currsize
            yield Change(self.path, f"{self.size} -> {now} results", self.found.__wrapped__)

    def _has_new(self) -> bool:
        now = self.found.cache_info()
        return bool(now.currsize > 0 and now.misses != self.computed)


def cached_functions() -> Iterator[functools._lru_cache_wrapper[Any]]:
    """Yield the functions with a cache that loaded modules define, but for torch's and other tools'."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _TOOLS and module is not None:
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    yield value
