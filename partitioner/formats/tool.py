"""The interface of every tool's module: what is written for it, and what is read from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from cost_models.errors import UsageError
from partitioner.formats.parallelism import Parallelism
from partitioner.record.data import PlanData


@dataclass(frozen=True)
class Written:
    """A plan in the words of another tool."""

    files: Mapping[str, str]
    """Content by file name; the first is the main one."""
    notes: tuple[str, ...] = ()
    """Differences between the tool's runtime and what was simulated."""

    def __str__(self) -> str:
        return next(iter(self.files.values())).rstrip("\n")


@dataclass(frozen=True)
class Understood:
    """A tool's configuration, read."""

    parallelism: Parallelism
    problems: tuple[str, ...] = ()
    """Rules of the tool that it breaks."""
    notes: tuple[str, ...] = ()
    """Settings that are not read, or mean something else here."""
    said: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the model that the file names, such as ``layers``."""


@dataclass(frozen=True)
class Tool:
    """A tool whose format is known."""

    title: str
    write: Callable[[PlanData], Written]
    """Raises UsageError with what the tool cannot express."""
    refuses: Callable[[Parallelism], Iterable[str]] = lambda parallelism: ()
    """Tells why the tool cannot run these degrees; nothing if it can."""
    read: Callable[[str, int], Understood] | None = None
    """Reads a file's text for a number of devices. Raises UsageError that names the place."""
    is_mine: Callable[[str, str], bool] = lambda source, text: False
    """Tells by a file's name and text whether it is one of the tool's."""


def cannot_express(title: str, problems: list[str], try_fix: str) -> UsageError:
    """Return the error of a plan that a tool has no words for. ``try_fix``: what of ``--fix`` it has."""
    return UsageError(
        f"{title} cannot run this plan",
        problems,
        [f"plan what it can run: --strategy hybrid --fix '{try_fix}'"],
    )
