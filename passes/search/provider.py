"""Providers: families of pipelines, each with an exact solver of its own, behind one interface.

    stages on single devices, cut anywhere            passes.search.layer
    stages on device groups, sharded inside           passes.search.hybrid
    one stage, sharded over all devices in any way    passes.search.feature

A provider proposes pipelines, best first by its surrogate, and proves a bound on its whole family;
``passes.search.fastest`` simulates the proposals of all providers and takes the fastest that fits.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Literal, Protocol, TypeVar

from cost_models.errors import PartitionerError
from passes.lower.candidate import Candidate
from passes.search.certificate import BoundTerm, PipelineTerms
from passes.search.judge import Simulated
from passes.search.outcome import Label, RunnerUp, ShardingDetails

Solved_co = TypeVar("Solved_co", covariant=True)
SolvedT = TypeVar("SolvedT")


@dataclass(frozen=True, eq=False)
class Proposal(Generic[Solved_co]):
    """A pipeline that is worth a simulation."""

    solved: Solved_co
    """The provider's own record of it."""
    seconds: float
    """The surrogate of its step."""
    option: Hashable = None
    """Equal for pipelines that are much alike: after one that overflows, the others wait until nothing else fits."""
    identity: Hashable = None
    """Equal for equal pipelines on equal ``ranks``, none of which is simulated twice; None: not known."""
    ranks: tuple[int, ...] = ()
    """The rank of each stage, where they are single devices."""
    least_seconds: float = 0.0
    """Seconds that its simulation cannot be below."""
    peak_bytes: int = 0
    """Bytes on the fullest device, as the provider estimates them."""
    name: str = ""
    """The name under which people look for it in any comparison; "" where it has none."""


@dataclass(frozen=True, eq=False)
class Judged(Generic[Solved_co]):
    """A proposal and what its simulation said."""

    proposal: Proposal[Solved_co]
    simulated: Simulated

    @property
    def runner_up(self) -> RunnerUp:
        """It as one of those that were not chosen."""
        name = self.proposal.name
        label = Label(name, (name,)) if name else Label.of(self.simulated.candidate)
        return replace(RunnerUp.of(label, self.simulated), named=bool(name))


@dataclass(frozen=True, eq=False)
class Proved:
    """The bound of a provider on its family."""

    space: str
    """The family in words, for the certificate."""
    method: str
    bound_seconds: float
    """No pipeline of the family has a surrogate below; infinite where none fits."""
    options: tuple[BoundTerm, ...]
    """The options of the family, the lowest bounds by name."""
    stopped: Literal["", "time limit", "interrupted"] = ""
    """The reason why the bound is not as good as it could be, if there is one."""
    whole_ops_bound_seconds: float = 0.0
    """Lower bound on the simulated step of pipelines of single devices; 0 where the family has none."""


@dataclass(frozen=True, eq=False)
class Valued:
    """The surrogate of a chosen pipeline, valued by its definition."""

    objective_seconds: float
    terms: PipelineTerms | None = None
    """The numbers that it follows from."""
    details: ShardingDetails | None = None


class Provider(Protocol[SolvedT]):
    """A family of pipelines with its solver."""

    words: str
    """Its stages in a few words, for who watches the search."""
    objective: str
    """The surrogate, as a formula."""
    quickly_bounded: bool
    """True if a bound on a proposal's simulation (``Judge.lower_bound_seconds``) takes much less than simulating it."""
    learns: bool
    """True if later proposals know what the allocator was seen to reserve; else all devices count as smaller in them."""
    slack: float
    """Proposals whose surrogate is above that of the fastest step so far by this factor are not simulated."""

    @property
    def simulated_first(self) -> int:
        """Proposals that are simulated whatever came of others; of the rest, those that win if their simulation is as far
        below the surrogate as any of these."""

    def proposals(self, known_seconds: float, room: float, deadline: float) -> Sequence[Proposal[SolvedT]]:
        """Solve all options that may be faster than ``known_seconds`` by surrogate; return what to simulate, in that order.

        ``room``: share of the memory to plan with; ``deadline``: value of ``time.perf_counter`` to stop at, once
        something is found. Ctrl-C stops it likewise.
        """

    def candidate(self, proposal: Proposal[SolvedT]) -> Candidate:
        """Return the placement that a proposal is."""

    def leaner(
        self, judged: Judged[SolvedT], room: float, known_seconds: float
    ) -> tuple[Proposal[SolvedT], float] | None:
        """Return a proposal like one that overflows, with less memory, and the room it was solved with."""

    def proved(self) -> Proved:
        """Return the bound of the first call of ``proposals`` that had any."""

    def valued(self, proposal: Proposal[SolvedT]) -> Valued:
        """Value a proposal that is chosen."""

    def refusal(self, tried: Sequence[Judged[SolvedT]], room: float) -> PartitionerError:
        """Return the error for a family none of whose proposals fits. ``room``: that of the last ones."""
