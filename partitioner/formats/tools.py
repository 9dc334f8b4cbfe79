"""The tools whose formats are known, by the name that the command line has for each. Imported only when asked for."""

from __future__ import annotations

from importlib import import_module

from cost_models.errors import UsageError
from cost_models.spec.fields import did_you_mean
from partitioner.formats.tool import Tool

TOOLS = (
    "megatron",
    "torchtitan",
    "torch_schedule",
    "accelerate",
    "deepspeed",
    "transformers",
    "vllm",
    "llama_cpp",
    "galvatron",
    "rankfile",
)
"""Modules of this folder; each has its ``TOOL``."""


def tool_named(name: str) -> Tool:
    """Return a tool by its name. Raises UsageError with the names there are."""
    if name not in TOOLS:
        raise UsageError(
            f"there is no tool {name!r}{did_you_mean(name, TOOLS)}", [f"there are {', '.join(TOOLS)}"]
        )
    found = import_module(f"partitioner.formats.{name}").TOOL
    assert isinstance(found, Tool)
    return found


def readers() -> list[str]:
    """Return the names of the tools whose configurations are read."""
    return [name for name in TOOLS if tool_named(name).read is not None]


def tool_of(text: str, source: str) -> str:
    """Return the name of the tool whose configuration this is. Raises UsageError if it is nobody's, or several's."""
    found = [
        name for name in TOOLS if (tool := tool_named(name)).read is not None and tool.is_mine(source, text)
    ]
    if len(found) != 1:
        why = (
            f"it may be of {' or '.join(found)}" if found else "it is like none of the formats that are known"
        )
        raise UsageError(
            f"cannot tell which tool {source} is of",
            [why],
            [f"say it: --from {name}" for name in found or readers()],
        )
    return found[0]
