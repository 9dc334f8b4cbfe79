"""Every number of the free search that is a choice: methods, limits of what is looked at, shares of the time, tolerances.

A method is switched off by 0, by False, or by leaving a word out. ``python -m benchmarks.free_ablation`` changes one
field at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StartFamily = Literal["earliest finish", "runs", "modules apart"]
Ranking = Literal["prediction", "load"]


@dataclass(frozen=True)
class FreeTuning:
    """One number each, with where it comes from. "By hand": chosen once, not tuned since."""

    # Units and starts
    most_tasks: int = 5000
    """Tasks that ops are merged into, roughly: a makespan of 5,000 is played in a fifth of a second."""
    starts: tuple[StartFamily, ...] = ("earliest finish", "runs", "modules apart")
    """Families of simple placements to begin with."""
    from_layer_wise: bool = True
    """True if the layer-wise plan is made first, as a start and as the answer where nothing beats it."""
    module_depth: int = 4
    """Depth of module paths up to which modules are placed apart. By hand."""
    most_modules: int = 4096
    """Modules of one depth beyond which they are not placed apart. By hand."""
    run_counts: int = 6
    """Numbers of contiguous runs that are tried, from two to one for each device. By hand."""
    run_bisections: int = 40
    """Halvings of the longest run's seconds; 2^-40 of them is less than rounding."""

    # Numbers of micro-batches
    first_counts: int = 6
    """Numbers looked at first, spread over all; then those beside the best. By hand."""
    deep_counts: int = 3
    """Numbers of micro-batches for which placements are searched in depth. By hand."""
    worth_depth: float = 1.25
    """Multiple of the best prediction up to which another number is searched in depth. By hand."""

    # Time, where it is limited
    least_seconds: float = 8.0
    """Limit of a search without one: this, more with ops times devices, at most ``most_seconds``. By hand."""
    most_seconds: float = 40.0
    """Longest limit of a search without one. By hand."""
    choices_per_second: float = 50.0
    """Ops times devices that add a second to the limit of a search without one. By hand."""
    search_share: float = 0.5
    """Share of the time after which searching ends. By hand."""
    simulate_share: float = 0.75
    """Share of the time after which simulating what was found ends; the rest is for climbing. By hand."""
    simulations_left: float = 2.5
    """Simulations that time is kept for when the search ends. By hand."""

    late: float = 0.98
    """Share of the limit: a search that took more was ended by the limit, its certificate says. By hand."""

    # Memory
    room_left: float = 0.97
    """Fullness of a device in the next search, if the estimate is as wrong as where it overflowed. By hand."""
    overflow_price: float = 8.0
    """Price of exceeding a device's memory by all of it while annealing, in multiples of all work. By hand."""

    # Annealing, from coarse units to all
    coarse_units: int = 96
    """Units that annealing begins with; an integer program over so many often closes its gap in seconds."""
    coarse_share: float = 2.0
    """Work that a coarse unit may have, in multiples of the mean. By hand."""
    least_shrink: float = 0.95
    """Share of units above which a level of coarsening is not worth having. By hand."""
    leaders: int = 3
    """Placements that are annealed from. By hand."""
    anneal_steps_per_unit: int = 120
    """Steps of annealing per coarse unit. By hand."""
    anneal_most_steps: int = 24_000
    """Steps of annealing coarse units at most. By hand."""
    anneal_first: float = 0.03
    """First temperature, relative to the energy at the start. By hand."""
    anneal_last: float = 2e-5
    """Last temperature, relative to the energy at the start. By hand."""
    refine_steps_per_unit: int = 12
    """Steps of annealing per unit of every finer level. By hand."""
    refine_most_steps: int = 8_000
    """Steps of annealing at most on every finer level. By hand."""
    refine_first: float = 2e-3
    """First temperature on finer levels. By hand."""
    norm_power: float = 12.0
    """Power of the norm of loads that is annealed; with K devices it is at most K^(1/12) times their maximum."""
    one_share: float = 0.55
    """Share of annealing's moves that move one unit. By hand."""
    swap_share: float = 0.2
    """Share of annealing's moves that swap two units, which tight memory needs; the rest move stretches. By hand."""
    refresh_steps: int = 5000
    """Steps after which loads are summed anew. By hand."""

    # Integer programs
    exact_program: bool = True
    """True if problems of few choices are solved as one integer program, which may prove its placement best."""
    neighbourhood_programs: bool = True
    """True if integer programs over some units are solved, all others fixed."""
    exact_choices: int = 900
    """Units times devices up to which one integer program is tried; problems with more are searched several times."""
    program_terms: int = 60_000
    """Nonzeros beyond which building and presolving takes longer than a round may. By hand."""
    program_seconds: float = 4.0
    """Seconds of one integer program over all units, at most. By hand."""
    quiet_neighbourhoods: int = 4
    """Neighbourhoods in a row without a better placement that end their search. By hand."""
    freed_units: int = 48
    """Units that one neighbourhood leaves open. By hand."""
    neighbourhood_seconds: float = 2.0
    """Seconds of a neighbourhood's program, at most. By hand."""
    neighbourhood_gap: float = 1e-4
    """Gap at which a neighbourhood's program is content. By hand."""
    proved: float = 1e-6
    """Gap below which nothing is left to prove: rounding."""
    bound_steps: int = 300
    """Steps towards the weights of the work bound; the best is then within about 1% of the relaxation's optimum."""

    # Climbing on the prediction
    climb_leaders: int = 2
    """Placements that are climbed from, twice as many for latency. By hand."""
    climb_work: int = 150_000
    """Tasks that are played while climbing from one placement, as a number of tries. By hand."""
    climb_most_tries: int = 1200
    """Neighbours of one placement that are predicted, at most. By hand."""
    climb_least_tries: int = 100
    """Neighbours of one placement that are predicted, at least. By hand."""
    climb_quiet_share: float = 0.25
    """Share of the tries without a better placement that ends climbing. By hand."""
    climb_slack: float = 0.02
    """Share by which a neighbour may be worse and be gone on from, less and less towards the end. By hand."""
    moved_one: float = 0.35
    """Share of neighbours in which one unit moves. By hand."""
    moved_stretch: float = 0.5
    """Share of neighbours in which a stretch of the program's order moves; in the rest, a module does. By hand."""

    # Random numbers, and large problems
    seed: int = 0
    """First random number."""
    many_tasks: int = 1000
    """Tasks from which on placements are not all predicted. By hand."""
    few_predicted: int = 4
    """Placements of such a problem that are predicted, at least. By hand."""
    first_predicted: int = 2
    """Placements of such a problem that are predicted because they were offered first. By hand."""
    most_seeds: int = 8
    """Times that a problem of more than ``exact_choices`` is searched, each with other random numbers. By hand."""
    quiet_seeds: int = 2
    """Searches in a row without a better prediction that end them. By hand."""
    seed_gain: float = 1e-3
    """Share by which a prediction must be better to count as such. By hand."""
    seed_time: float = 0.5
    """Time that must be left for one search more, in multiples of the last one's. By hand."""

    # Prediction
    message_share: float = 0.5
    """Share of messages' seconds that a device is kept from computing. By hand, between none and all."""
    most_played: int = 3
    """Micro-batches that a prediction plays, at most. By hand."""
    played_tasks: int = 1200
    """Tasks that a prediction plays, about: three micro-batches of 400 or one of 1,200. By hand."""

    # Simulation
    simulations: int = 12
    """Placements simulated at most, for each number of micro-batches. By hand."""
    ranked_by: tuple[Ranking, ...] = ("prediction", "load")
    """Rankings that placements are taken from in turn to be simulated."""
    schedules: tuple[str, ...] = ("list", "list-split")
    """List schedules that are tried: free placements revisit devices, so no pipeline's order is made for them."""
    both_seconds: float = 0.05
    """Seconds of a simulation above which only the schedule that won more often is simulated. By hand."""
    long_step: int = 20_000
    """Instructions of a step above which only the last schedule is simulated, from the first placement on. By hand."""
    merge_seconds: float = 5.0
    """Seconds for which segments of the chosen placement are merged, at most. By hand."""
    merge_times: float = 3.0
    """Simulations' time that must be left to begin merging: a few trials, and simulating the result. By hand."""

    # Climbing on the simulation
    climbed: int = 3
    """Placements of a large problem that are climbed from, one after the other; then the best again. By hand."""
    climb_best: bool = True
    """True if a large problem's best placement is climbed from once more at the end."""
    predicted_per_simulation: int = 6
    """Neighbours that are predicted for each that is simulated. By hand."""
    simulated_slack: float = 0.01
    """Share by which a neighbour may be slower and be gone on from, less with each that is no better. By hand."""
    patience: float = 0.4
    """Share of the time left without a better placement after which the next is climbed from. By hand."""
    quiet_seconds: float = 2.0
    """Seconds without a better placement that end climbing. By hand."""
    least_quiet: int = 16
    """Simulations without a better placement that end climbing, at least. By hand."""
    most_quiet: int = 120
    """Simulations without a better placement that end climbing, at most. By hand."""

    # Blocks of neurons
    whole_share: float = 0.55
    """Share of the time after the layer-wise plan for the graph as it is, where shapes may come after it. By hand."""
    alone_share: float = 0.93
    """The same where no shapes come after it; the rest is for merging. By hand."""
    shape_share: float = 0.35
    """Share of the time left for the next search of a shape. By hand."""
    most_shapes: int = 6
    """Shapes that are made, where the time is limited. By hand."""
    few_shapes: int = 2
    """Shapes that are made, where the time is not limited. By hand."""
    most_recuts: int = 2
    """Times that a shape's blocks are cut again. By hand."""
    promising: float = 1.15
    """Multiple of the best known step beyond which the estimate keeps a shape from being made. By hand."""
    recut_within: float = 1.1
    """Multiple of the best known step up to which a shape's blocks are cut again. By hand."""
    least_change: float = 0.01
    """Share of a family that must change for its blocks to be cut again. By hand."""
    making_per_op: float = 1.5e-3
    """Seconds that splitting and costs take per op of the graph that is made, before one was made. Measured."""
    shape_least_seconds: float = 0.3
    """Seconds below which a search of a shape is not begun. By hand."""
    shape_numbers: int = 5
    """Numbers of devices, and of micro-batches, for which shapes are estimated. By hand."""
    most_block_devices: int = 16
    """Devices up to which models are split by themselves. By hand."""
    large_family: float = 0.3
    """Share of a device's fair part of all work above which a family is large, hard to balance. By hand."""
    worth_family: float = 0.005
    """Share of all work below which a family is left whole. By hand."""
    most_split_ops: int = 8000
    """Ops that a graph with blocks may have. By hand."""
    ops_per_block: int = 12
    """Ops that a block of a family brings, about. By hand."""


DEFAULT = FreeTuning()
"""The compiler's own numbers."""
