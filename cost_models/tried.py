"""Releases of Python and of the libraries that this was tried with: an error of anything else begins by saying so."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

TRIED: Mapping[str, tuple[str, str]] = {
    "Python": ("3.11", "3.12"),
    "torch": ("2.11", "2.14"),
    "numpy": ("1", "2"),
    "networkx": ("3", "3"),
    "pulp": ("3", "3"),
    "highspy": ("1", "1"),
    "pydantic": ("2", "2"),
    "pyyaml": ("6", "6"),
    "cyclopts": ("5", "5"),
    "rich": ("13", "15"),
    "jinja2": ("3", "3"),
    "transformers": ("5", "5"),
}
"""The first and the last release, as exact as a release may change what is relied upon; README says what was tried when."""


def untried_versions() -> list[str]:
    """Return a line for everything installed here that was not tried; none where all was."""
    return [
        f"{name} {found} was not tried; known good: {low}" + (f" to {high}" if high != low else "")
        for name, (low, high) in TRIED.items()
        if (found := _installed(name)) is not None
        and not _release(low) <= _release(found)[: low.count(".") + 1] <= _release(high)
    ]


def _installed(name: str) -> str | None:
    if name == "Python":
        return platform.python_version()
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _release(text: str) -> tuple[int, ...]:
    """Return the numbers of "2.14.1+cu130": 2, 14 and 1."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", text)[0])))
