"""Refusals of a model that fails on its example, or whose trace would be another model, with the lines that do it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import nn

from cost_models.errors import ModelError
from cost_models.units import listed
from passes.fidelity.lines import clock_lines, hook_lines, line_of, with_line
from passes.graph.graph import OpGraph
from passes.trace.attempts import WHOLE
from passes.trace.draws import Draws
from passes.trace.noted import Change

OFF = 'check="off" plans it all the same'


def backward_fails(graph: OpGraph, because: list[str]) -> ModelError:
    return ModelError(
        f"backward of {graph.model_name} fails on the example, as it would in every step",
        because,
        [
            "give the op a backward (torch.library.register_autograd, autograd.Function), or detach what it is given",
            "call loss.backward() on example_inputs yourself: it fails alike",
            OFF,
        ],
    )


def parts_need_more(graph: OpGraph, leaves: Sequence[str], why: str) -> ModelError:
    first, shapes = leaves[0], graph.example_shapes
    fixed = [note for note in graph.notes if note.startswith(tuple(f"{leaf} {WHOLE}" for leaf in leaves))]
    return ModelError(
        f"micro-batches of {graph.model_name} would get {listed(leaves)} whole, and need their own samples of it",
        [why, *(fixed or [f"{name}, {shapes[name]}, has no batch dimension" for name in leaves])],
        [
            "take sizes from tensor.shape in the model: no list, loop or split with an entry for each sample",
            f"opaque=[the module that fixes the size of {first}] runs its code as it is, as one op",
            f"batch_dims={{{first!r}: dim}} says which of its dimensions counts samples; {{{first!r}: None}} that none "
            f"does, as with microbatches=1 and batches of {graph.example_batch_size} samples only",
        ],
    )


def hook_draws(graph: OpGraph, hook: Callable[..., object]) -> ModelError:
    return ModelError(
        f"a hook on a parameter of {graph.model_name} draws random numbers",
        [f"{line_of(hook)}: ranks that hold copies of the parameter would draw other ones"],
        ["make it the same for the same gradient (scale, clip, mask)", OFF],
    )


def writes_parameters(graph: OpGraph, model: nn.Module, written: Sequence[str]) -> ModelError:
    return ModelError(
        f"a step of {graph.model_name} changes its parameters before the optimizer does",
        [f"{', '.join(written[:3])}: other values after forward and backward", *hook_lines(model)],
        ["step the optimizer after backward: a plan runs it on every rank", OFF],
    )


def computes_something_else(
    graph: OpGraph, model: nn.Module, why: str, switched: Mapping[str, str], changes: Sequence[Change]
) -> ModelError:
    """``switched``: lines of forward that choose what gets gradients, each with what to write instead."""
    verify = 'plan.verify(model) shows the first op that differs, for a plan made with check="off"'
    return ModelError(
        f"the traced graph of {graph.model_name} computes something else than the model",
        [f"in the graph, {why}", *list(switched)[:4], *hook_lines(model), *map(with_line, changes[:3])],
        list(dict.fromkeys(switched.values())) or [verify, OFF],
    )


def depends_on_state(
    graph: OpGraph, model: nn.Module, draws: Draws, changes: Sequence[Change], why: str
) -> ModelError:
    lines = [*draws.lines()[:3], *map(with_line, changes[:5])]
    ways = [
        "keep it in a buffer that forward updates (and gives a backward of its own): it is part of the plan"
    ]
    if not lines:
        nothing = "nothing of the model's attributes, of random or of numpy.random changed between the calls"
        lines = [nothing, *clock_lines(model)[:3]]
        ways = [
            "give forward such a number as a tensor of the batch: a plan sends it to the ranks that need it"
        ]
    if any(change.path.startswith("loss_fn") for change in changes):
        ways = [
            "make the loss function a module of the model, with its state in buffers, and return the loss from forward"
        ]
    before = ", after a step on other samples," if changes else ""
    if draws:
        ways = ["draw with torch (torch.rand, F.dropout), whose numbers a plan draws anew in every step"]
    return ModelError(
        f"{graph.model_name} computes something else at every call, of which a plan would keep the first",
        [f"called again{before} with the same batch, parameters and torch seed: {why}", *lines],
        [*ways, "switch it off for training (layer drop of 0, a fixed step)", OFF],
    )


def hooks_matter(graph: OpGraph, hooks: Sequence[str], why: str) -> ModelError:
    module = next((hook.rsplit(" ", 1)[1] for hook in hooks if " of module " in hook), "")
    named = module if module and module != "(root)" else "the.module"
    return ModelError(
        f"hooks change gradients inside {graph.model_name}, and the traced graph has no place for them",
        [*hooks[:5], f"without them, {why}"],
        [
            "a gradient times c: c * x + ((1 - c) * x).detach() in forward",
            "parameter.register_hook(…) instead, if it is a parameter's gradient: a plan runs these",
            f'opaque=["{named}"] runs that module as it is, hooks included',
            OFF,
        ],
    )
