"""The docstrings of the public API as the site shows them: an extension of griffe, which mkdocs.yml names.

:func:`trace`                     becomes    `trace`
``name``: meaning                 becomes    a list, where each line explains one argument
the options of ``partition``      are added, as ``help`` shows them
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

import partitioner

ROLE = re.compile(r":(?:class|func|meth|mod):`")
ARGUMENT = re.compile(r"(?m)^(``\w+``(?:, ``\w+``)*: )")


class SiteDocstrings(griffe.Extension):
    """Rewrites docstrings after their module was read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one docstring."""
        if obj.path == "partitioner.api.partition" and obj.docstring:
            obj.docstring.value = inspect.getdoc(partitioner.partition) or ""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Return a docstring without roles, and with arguments as a list."""
    lines: list[str] = []
    around_code = ROLE.sub("`", text).split("``")
    around_code[::2] = [part.replace("*", r"\*") for part in around_code[::2]]
    for line in "``".join(around_code).splitlines():
        listed = ARGUMENT.sub(r"- \1", line)
        if listed != line and lines and lines[-1] and not lines[-1].startswith("- "):
            lines.append("")
        lines.append(listed)
    return "\n".join(lines)
