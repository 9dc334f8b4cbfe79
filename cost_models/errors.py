"""Every error a user can meet: what went wrong, why, and what to try.

The command line prints them as ``error[kind]: what`` / ``because:`` / ``try:`` and exits with
``exit_code``; the library raises them. They live on the lowest floor because every floor raises them.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import ClassVar

from cost_models.shown import as_html, printable
from cost_models.tried import untried_versions


class PartitionerError(Exception):
    """Base of all errors raised on purpose.

    ``what`` states the operation that failed, ``because`` each reason with its numbers, ``suggestions``
    what the user can change.
    """

    kind: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1
    by_versions: ClassVar[bool] = False
    """True if a library of another version than was tried can be the reason: then the error begins with it."""

    def __init__(self, what: str, because: Sequence[str] = (), suggestions: Sequence[str] = ()) -> None:
        self.what = what
        self.because = tuple(because)
        self.suggestions = tuple(suggestions)
        super().__init__(self.render())

    def render(self) -> str:
        """Write the error as the command line prints it on stderr."""
        lines = untried_versions() if self.by_versions else []
        lines += [f"error[{self.kind}]: {self.what}"]
        lines += [f"  because: {reason}" for reason in self.because]
        lines += [f"  try: {suggestion}" for suggestion in self.suggestions]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return as_html(self.render())

    def _render_traceback_(self) -> list[str]:
        """Say it to IPython, which shows this instead of a traceback."""
        return printable(self.render()).splitlines()

    def __reduce__(self) -> tuple[type[PartitionerError], tuple[str, tuple[str, ...], tuple[str, ...]]]:
        return type(self), (self.what, self.because, self.suggestions)


class UsageError(PartitionerError):
    """A flag, an argument or a combination of them is wrong."""

    kind = "usage"
    exit_code = 2


class ClusterError(UsageError):
    """A cluster file, preset or device description is wrong."""

    kind = "cluster"


class PlanError(UsageError):
    """A plan file cannot be read, or does not fit the model, batch or world it is used with."""

    kind = "plan"


class GraphError(UsageError):
    """A file with a cost graph cannot be read, or is none."""

    kind = "graph"


class CheckpointError(UsageError):
    """Weights or a checkpoint cannot be read or written, or belong to another model."""

    kind = "checkpoint"


class ModelError(PartitionerError):
    """The model cannot be loaded, traced or lowered."""

    kind = "model"
    exit_code = 3
    by_versions = True


class InfeasibleError(PartitionerError):
    """No plan fits the cluster."""

    kind = "infeasible"
    exit_code = 4


class TimeLimitError(PartitionerError):
    """The search ran out of time (the best plan so far is still written)."""

    kind = "time-limit"
    exit_code = 5


class InterruptedSearchError(PartitionerError):
    """The search was interrupted before it had found a plan that fits."""

    kind = "interrupted"
    exit_code = 130
    """The code that shells give to a process ended by Ctrl-C: 128 + SIGINT."""


class RankFailureError(PartitionerError):
    """A rank died or hung; names the rank and the instruction that was waited on."""

    kind = "rank"
    exit_code = 6
    by_versions = True


class VerificationError(PartitionerError):
    """A partitioned model computed something else than the unpartitioned one."""

    kind = "verification"
    exit_code = 7
    by_versions = True


class InternalError(PartitionerError):
    """A compiler invariant does not hold: a bug of ours. Names the pass or rule that found it."""

    by_versions = True

    def _render_traceback_(self) -> list[str]:
        """Show IPython's users the whole traceback: it is needed to mend the bug."""
        return printable("".join(traceback.format_exception(self))).splitlines()


class DeadlockError(InternalError):
    """A program does not pass the checker."""

    kind = "deadlock"
