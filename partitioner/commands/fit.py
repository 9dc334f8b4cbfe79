"""``partitioner fit``: the largest batch, or the longest sequence, that fits each cluster."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from cost_models.errors import UsageError
from partitioner.commands.options import (
    NOTHING_GIVEN,
    Clusters,
    Dims,
    Flag,
    JsonFlag,
    ModelOptions,
    QuietFlag,
    WholeNumber,
    cluster_texts,
)
from partitioner.planning.option_table import with_command_help
from runtime.collector import collector_paused


@with_command_help
def fit(
    *models: str,
    cluster: Clusters,
    largest: str = "batch",
    batch_size: WholeNumber = 1,
    most: WholeNumber | None = None,
    step: WholeNumber | None = None,
    strategy: str = "auto",
    microbatches: str = "1",
    micro_couplings: Flag = False,
    schedule: str = "auto",
    optimizer_memory: str = "adamw",
    precision: str | None = None,
    loss_reduction: str | None = None,
    min_stages: WholeNumber | None = None,
    max_stages: WholeNumber | None = None,
    recompute: str | None = None,
    pin: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    mesh: str | None = None,
    fix: str | None = None,
    objective: str | None = None,
    split: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    batch_dims: Dims = (),
    dynamic_dims: Dims = (),
    opaque: Annotated[tuple[str, ...], Parameter(show_default=False)] = (),
    check: str = "on",
    risk: str = "5%",
    time_limit: float | None = None,
    model_options: ModelOptions = NOTHING_GIVEN,
    quiet: QuietFlag = False,
    json: JsonFlag = False,
) -> int:
    """Find the largest batch, or sequence, of each MODEL that fits each cluster, and what a step of it takes.

    Parameters
    ----------
    models
        As for partitioner plan; several are fitted one after the other.
    cluster
        As for partitioner plan; may be repeated, or be PRESET:1,2,4 for each of these numbers.
    largest
        batch: samples in a step, all in memory at once unless there are several micro-batches. sequence: tokens in a sample
        (the factory's argument seq), each length traced for itself.
    most
        Do not look beyond so many samples, or tokens. By default 65,536 samples, 1,048,576 tokens.
    step
        Look at multiples of it only. By default of 1 sample, 128 tokens.
    """
    arguments = dict(locals())
    for name in ("models", "cluster", "largest", "most", "step", "quiet", "json"):
        del arguments[name]
    if not models:
        raise UsageError("cannot read the command line", ["no MODEL is given"])
    with collector_paused():
        from partitioner.commands.offers import fit_each  # it imports torch

        return fit_each(
            models, cluster_texts(cluster), largest, most, step, arguments, quiet=quiet, json=json
        )
