"""``partitioner fit``: the largest batch, or the longest sequence, that fits each cluster."""

from __future__ import annotations

from cost_models.errors import UsageError
from partitioner.commands.options import (
    NOTHING_GIVEN,
    Clusters,
    JsonFlag,
    ModelOptions,
    QuietFlag,
    WholeNumber,
    cluster_texts,
)
from partitioner.commands.plan_options import AS_USUAL, PlanChoices
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
    microbatches: str = "1",
    choices: PlanChoices = AS_USUAL,
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
    arguments = {
        **choices.arguments(),
        "batch_size": batch_size,
        "microbatches": microbatches,
        "model_options": model_options,
    }
    if not models:
        raise UsageError("cannot read the command line", ["no MODEL is given"])
    with collector_paused():
        from partitioner.commands.offers import fit_each  # it imports torch

        return fit_each(
            models, cluster_texts(cluster), largest, most, step, arguments, quiet=quiet, json=json
        )
