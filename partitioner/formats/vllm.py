"""vLLM's flags: how many shards and stages serve the model, and the layers of each stage.

    VLLM_PP_LAYER_PARTITION=31,31,18 vllm serve MODEL --tensor-parallel-size 2 --pipeline-parallel-size 3

Names: vLLM's documentation of 2026 (parallelism and scaling, environment variables).
"""

from __future__ import annotations

from collections.abc import Iterator

from partitioner.formats.from_plan import parallelism_of
from partitioner.formats.parallelism import Parallelism
from partitioner.formats.tool import Tool, Written, cannot_express
from partitioner.record.data import PlanData

TITLE = "vLLM"


def write(plan: PlanData) -> Written:
    """Write the command that serves the model so."""
    p = parallelism_of(plan)
    problems = list(refusals(p))
    if problems:
        raise cannot_express(TITLE, problems, "pipeline=… tensor=… data=… zero=0")
    layers = f"VLLM_PP_LAYER_PARTITION={','.join(map(str, p.layers))} " if p.pipeline > 1 else ""
    flags = [f"--tensor-parallel-size {p.tensor}", f"--pipeline-parallel-size {p.pipeline}"]
    flags += [f"--data-parallel-size {p.data}"] if p.data > 1 else []
    return Written({"vllm.sh": f"{layers}vllm serve MODEL {' '.join(flags)}\n"}, tuple(_notes(p)))


def refusals(p: Parallelism) -> Iterator[str]:
    """Yield why it cannot run these degrees."""
    if p.chunks > 1:
        yield "a device serves one run of layers, not several"
    if p.zero == 3:
        yield "each replica holds its parameters"


def _notes(p: Parallelism) -> Iterator[str]:
    yield "it serves the model: a training step's time and memory do not hold, the cache of keys and values takes the rest"
    if p.pipeline > 1:
        yield "embedding and head are on the first and the last stage, wherever the plan has them"


TOOL = Tool(TITLE, write, refusals)
