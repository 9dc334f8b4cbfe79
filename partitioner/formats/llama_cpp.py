"""llama.cpp's flags: the share of the layers that each GPU holds.

    llama-server -m MODEL.gguf -ngl 99 -sm layer -ts 3,1

Names: llama.cpp's README of its server and llama-cli, 2026.
"""

from __future__ import annotations

from collections.abc import Iterator

from partitioner.formats.from_plan import parallelism_of
from partitioner.formats.parallelism import Parallelism
from partitioner.formats.tool import Tool, Written, cannot_express
from partitioner.record.data import PlanData

TITLE = "llama.cpp"


def write(plan: PlanData) -> Written:
    """Write the command that serves the model so: -ts is the layers of each stage."""
    p = parallelism_of(plan)
    problems = list(refusals(p))
    if problems:
        raise cannot_express(TITLE, problems, "pipeline=… tensor=1 data=1")
    shares = ",".join(map(str, p.layers)) if p.pipeline > 1 else "1"
    groups = [stage.devices[0] for stage in plan.stages]
    order = "" if groups == sorted(groups) else f" -dev {','.join(f'CUDA{rank}' for rank in groups)}"
    text = f"llama-server -m MODEL.gguf -ngl 99 -sm layer -ts {shares}{order}\n"
    return Written({"llama_cpp.sh": text}, tuple(_notes(p)))


def refusals(p: Parallelism) -> Iterator[str]:
    """Yield why it cannot run these degrees."""
    if p.tensor > 1:
        yield "its split by rows has one way to divide weights, not the plan's"
    if p.data > 1:
        yield "it runs one replica"
    if p.chunks > 1:
        yield "a device holds one run of layers, not several"
    if p.pipeline > 1 and 0 in p.layers:
        yield "a device without a layer gets nothing: embedding and head go with the first and the last layers"


def _notes(p: Parallelism) -> Iterator[str]:
    yield "it serves the model: a training step's time and memory do not hold"
    if p.pipeline > 1:
        yield "devices run one behind the other, with one batch in flight where no several requests overlap"
        yield "-ts are proportions of layers and head as llama.cpp counts them: a border may be off by one layer"


TOOL = Tool(TITLE, write, refusals)
