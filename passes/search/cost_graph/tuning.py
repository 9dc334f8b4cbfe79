"""Every number of the cost-graph searches that is a choice: sizes, shares of the time limit, ends of a search."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CostGraphTuning:
    """One number each, with where it comes from. "By hand": chosen once, not tuned since.

    Tolerances of numbers and of solvers stand in the files that use them.
    """

    # contiguous placements
    most_downsets: int = 40_000
    """Downsets up to which the dynamic program runs over all of them. By hand; 2,774 take 0.4 s and time grows with their
    square (docs/14-graphs-from-elsewhere.md)."""
    multiplications_per_second: float = 3e9
    """Speed of the dynamic program on one core of a common machine, by which its time is estimated. By hand."""
    listed_share: float = 0.5
    """Share of the time limit that the program over all downsets may take. By hand."""
    family: int = 2500
    """Downsets of a restricted family. By hand."""
    near: int = 200
    """Downsets looked at around each cut. By hand."""
    orders: int = 4
    """Random orders through the best cuts, per round. By hand."""
    quiet_families: int = 12
    """Families without a better chain after which the search ends. By hand."""
    widest_net: int = 24
    """Groups of a net beyond which it is compared by itself: its one-hot rows would be too long. By hand."""
    chunk: int = 512
    """Downsets that the dynamic program takes at once, to bound its memory. By hand."""

    # free placements
    first_steps: int = 10_000
    """Steps of the first round of annealing, at least; each round takes twice as many as the last. By hand."""
    most_steps: int = 640_000
    """Steps of a round of annealing at most. By hand."""
    most_chains: int = 64
    """Placements annealed at once, up to 200 groups; fewer for more groups. By hand."""
    least_chains: int = 16
    """Placements annealed at once at least. By hand."""
    large: int = 300
    """Groups from which on the first round begins at the contiguous placement: from anywhere it takes too long. By hand."""
    contiguous_share: float = 0.2
    """Share of the time limit for the contiguous placement to start from. By hand."""
    large_contiguous_share: float = 0.5
    """The same share for large graphs, where little beats that placement; raised from 0.2 with the figures of
    docs/14-graphs-from-elsewhere.md."""
    round_share: float = 0.25
    """Share of the time left for a round of annealing at most; of a large graph, twice that. By hand."""
    quiet_rounds: int = 6
    """Rounds of annealing without a better placement or bound after which the search ends. By hand."""
    most_bisected_groups: int = 160
    """Groups on two devices up to which an integer program divides them anew; more are left to annealing. By hand."""
    refinements: int = 8
    """Passes over all groups to send less at the same largest load, at most. By hand."""
    most_choices: int = 600
    """Groups times devices up to which one integer program holds everything: beyond, its relaxation is too weak to prove
    anything in a minute. By hand."""
    stretches: int = 100
    """Stretches of a line that the bound begins with, at most. By hand."""
    forbidden: float = 1e3
    """Cost of a group where it may not be, in multiples of all work. By hand."""

    # latency
    start_share: float = 0.15
    """Share of the time limit for the contiguous placement to start from. By hand."""
    quiet_moves: int = 20_000
    """Moves without a better placement after which the search ends; at least twenty per group. By hand."""

    # layouts
    far: float = 0.5
    """Share of the value that a program was scaled to: a step below it is the start of another program. By hand."""


TUNING = CostGraphTuning()
"""The numbers that the searches use."""
