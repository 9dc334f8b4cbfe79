"""Graph modules whose Python code is written when they are first run, not whenever their graph changes.

``torch.export`` makes and changes a dozen modules of a whole model's graph and runs none of them: writing their code took a
fifth of the time of a trace.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch.fx import GraphModule
from torch.fx.graph import _PyTreeCodeGen

UNWRITTEN = "# written when the module is first called"
"""The code of a module that was not called yet."""


@contextlib.contextmanager
def code_on_demand() -> Iterator[None]:
    """Let ``GraphModule.recompile`` only note that the code is out of date; the first call writes it, also later on."""
    recompile = GraphModule.recompile

    def first_call(module: GraphModule, *args: Any, **kwargs: Any) -> Any:
        recompile(module)
        return module(*args, **kwargs)

    def note(module: GraphModule) -> None:
        codegen = module._graph._codegen
        if isinstance(codegen, _PyTreeCodeGen):
            module._in_spec, module._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
        module._code = UNWRITTEN
        type(module).forward = first_call  # a graph module's class is its own

    with mock.patch.object(GraphModule, "recompile", note):
        yield
