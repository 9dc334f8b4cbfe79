"""Equal blocks are written from the record of one; whatever else a block does, the graph is that of the whole trace."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import tests.support.switches
from partitioner.models.hugging_face import build, example_batch
from partitioner.models.load import load_workload
from passes.trace.trace import trace
from tests.support.whole_trace import differences

LAYERS = 6
FLAG = [0]
OWN = threading.local()
WORD = ContextVar("word", default=0)


class Block(nn.Module):
    """A residual block that is numbered, and does nothing with its number."""

    scale = 1.0

    def __init__(self, number: int, config: Any) -> None:
        super().__init__()
        self.number, self.config = number, config
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, *more: Any) -> Any:
        return x + self.inner(x, *more)

    def inner(self, x: Tensor, *more: Any) -> Tensor:
        out: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return out


class Tower(nn.Module):
    """Blocks in a row; ``between`` runs before each of them."""

    def __init__(
        self, block: type[Block], between: Callable[[Any, int], Any] | None = None, **config: Any
    ) -> None:
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.layers = nn.ModuleList(block(number, self.config) for number in range(LAYERS))
        self.between = between
        self.stem, self.head = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for number, layer in enumerate(self.layers):
            more = self.between(self, number) if self.between is not None else ()
            x = layer(x, *more)
        out: Tensor = self.head(x)
        return out


def _loss(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def _check(model: nn.Module, written: int) -> None:
    unlike, counted = differences(model, torch.randn(3, 5, 8), loss_fn=_loss)
    assert unlike == []
    assert counted.total() == written


def test_blocks_that_differ_in_an_unread_number_are_written_but_the_first_two() -> None:
    _check(Tower(Block), LAYERS - 2)


class Dropping(Block):
    """Torch's random numbers are an operation of the graph."""

    def inner(self, x: Tensor, *more: Any) -> Tensor:
        return nn.functional.dropout(super().inner(x), 0.1, self.training)


class InPlace(Block):
    """Writes to what it made itself."""

    def inner(self, x: Tensor, *more: Any) -> Tensor:
        return super().inner(x).mul_(2.0).add_(1.0)


class SameTensor(Block):
    """``x.to(x.dtype)`` is ``x``: later readers of ``x`` read the node of the conversion."""

    def forward(self, x: Tensor, *more: Any) -> Any:
        return self.inner(x.to(torch.float32)) + x


class Views(Block):
    """Returns another view of all that it made."""

    def forward(self, x: Tensor, *more: Any) -> Any:
        return (x + self.inner(x)).reshape(-1, 5 * 8).view(-1, 5, 8)


class Recomputed(Block):
    """Is recomputed in backward, which export leaves out."""

    def forward(self, x: Tensor, *more: Any) -> Any:
        return x + torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


class Cycle(Block):
    """Leaves a list of its own tensors that refers to itself, which only the garbage collector frees."""

    def inner(self, x: Tensor, *more: Any) -> Tensor:
        x = super().inner(x)
        left: list[Any] = [x]
        left.append(left)
        return x * 2.0


@pytest.mark.parametrize("block", [Dropping, InPlace, SameTensor, Views, Recomputed, Cycle])
def test_written_blocks_are_what_their_run_would_be(block: type[Block]) -> None:
    _check(Tower(block), LAYERS - 2)


def test_a_callback_of_the_collector_is_no_code_of_the_blocks() -> None:
    def collected(phase: str, info: Any) -> None:
        """Do nothing."""

    gc.callbacks.append(collected)
    try:
        _check(Tower(Cycle), LAYERS - 2)
    finally:
        gc.callbacks.remove(collected)


class ReadsNumber(Block):
    """Is another function in every second layer."""

    def inner(self, x: Tensor, *more: Any) -> Tensor:
        return super().inner(x) if self.number % 2 else super().inner(x) * 2.0


class ReadsAllAttributes(Block):
    """The same, by way of the dictionary."""

    def inner(self, x: Tensor, *more: Any) -> Tensor:
        return super().inner(x) * float(vars(self)["number"])


class ReadsByName(Block):
    """The same, by a name that the code makes up."""

    def inner(self, x: Tensor, *more: Any) -> Tensor:
        return super().inner(x) * getattr(self, "num" + "ber", 1)


class ReadsGlobal(Block):
    """Reads a list of the file."""

    def inner(self, x: Tensor, *more: Any) -> Tensor:
        return super().inner(x) * FLAG[0]


def _flagged_distance(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().sum(-1, keepdim=True) * FLAG[0]


class GivesFunction(Block):
    """Gives a function of torch's one that reads a list of the file."""

    def inner(self, x: Tensor, *more: Any) -> Tensor:
        return nn.functional.triplet_margin_with_distance_loss(
            x, super().inner(x), -x, distance_function=_flagged_distance, reduction="none"
        )


class _Flagged(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * FLAG[0] if func is torch.relu else result


class UnderMode(Tower):
    """Runs under a mode that reads a list of the file."""

    def forward(self, x: Tensor) -> Tensor:
        with _Flagged():
            return super().forward(x)


class ReadsClass(Block):
    """Reads an attribute of its class."""

    def inner(self, x: Tensor, *more: Any) -> Tensor:
        return super().inner(x) * type(self).scale


class ReadsWord(Block):
    """Reads a context variable."""

    def inner(self, x: Tensor, *more: Any) -> Tensor:
        return super().inner(x) * WORD.get()


class ReadsConfig(Block):
    """Reads an object that all blocks have."""

    def inner(self, x: Tensor, *more: Any) -> Tensor:
        return super().inner(x) * self.config.scale


class ReadsThread(Block):
    """Reads an attribute of its thread."""

    def inner(self, x: Tensor, *more: Any) -> Tensor:
        return super().inner(x) * OWN.number


class ReadsModule(Block):
    """Reads an attribute of a module, imported by the file, and of one that forward imports."""

    def inner(self, x: Tensor, *more: Any) -> Tensor:
        from tests.support import switches as again

        return super().inner(x) * (tests.support.switches.FLAG + again.FLAG)


class ReadsTensor(Block):
    """Reads an attribute that its input was given."""

    def inner(self, x: Tensor, *more: Any) -> Tensor:
        return super().inner(more[0]) * more[0].number


class ReadsArgument(Block):
    """Is given a number."""

    def inner(self, x: Tensor, *more: Any) -> Tensor:
        return super().inner(x) * more[0]


class Counts(Block):
    """Changes what all blocks have: the fourth is another function."""

    def inner(self, x: Tensor, *more: Any) -> Tensor:
        self.config.runs += 1
        return super().inner(x) * (2.0 if self.config.runs > 3 else 1.0)


class Closes(Block):
    """Changes what its method closes over."""

    @staticmethod
    def _count() -> Callable[[], int]:
        runs = 0

        def count() -> int:
            nonlocal runs
            runs = (runs + 1) % LAYERS  # both traces find the same
            return runs

        return count

    counted = staticmethod(_count())

    def inner(self, x: Tensor, *more: Any) -> Tensor:
        return super().inner(x) * (2.0 if self.counted() > 3 else 1.0)


class Keeps(Block):
    """Leaves a tensor in a list, of which the model's head makes use."""

    def forward(self, x: Tensor, *more: Any) -> Any:
        self.config.kept.append(self.norm(x).mean())
        return x + self.inner(x)


class Draws(Block):
    """Draws from Python's generator."""

    def inner(self, x: Tensor, *more: Any) -> Tensor:
        return super().inner(x) * random.random()


class Iterates(Block):
    """Takes the next of a number that nobody can look at."""

    def __init__(self, number: int, config: Any) -> None:
        super().__init__(number, config)
        self.scales: Iterator[int] = config.scales

    def inner(self, x: Tensor, *more: Any) -> Tensor:
        return super().inner(x) * next(self.scales)


class Statistics(Block):
    """Writes running statistics."""

    def __init__(self, number: int, config: Any) -> None:
        super().__init__(number, config)
        self.norm = nn.BatchNorm1d(5)  # type: ignore[assignment]


class WritesInput(Block):
    """Writes to what it is given."""

    def forward(self, x: Tensor, *more: Any) -> Any:
        return x.add_(self.inner(x * 1.0))


def _set_flag(model: Any, number: int) -> Any:
    FLAG[0] = number
    return ()


def _set_own(model: Any, number: int) -> Any:
    OWN.number = number
    return ()


def _set_module(model: Any, number: int) -> Any:
    tests.support.switches.FLAG = number
    return ()


def _numbered_tensor(model: Any, number: int) -> Any:
    given = torch.ones(8)
    given.number = number  # type: ignore[attr-defined]
    return (given,)


def _set_word(model: Any, number: int) -> Any:
    WORD.set(number)
    return ()


def _set_scale(model: Any, number: int) -> Any:
    model.config.scale = float(number)
    return ()


def _set_class(model: Any, number: int) -> Any:
    type(model.layers[0]).scale = float(number)
    return ()


@pytest.mark.parametrize(
    ("block", "between", "config"),
    [
        (ReadsNumber, None, {}),
        (ReadsAllAttributes, None, {}),
        (ReadsByName, None, {}),
        (ReadsGlobal, _set_flag, {}),
        (GivesFunction, _set_flag, {}),
        (ReadsWord, _set_word, {}),
        (ReadsThread, _set_own, {}),
        (ReadsModule, _set_module, {}),
        (ReadsTensor, _numbered_tensor, {}),
        (ReadsConfig, _set_scale, {"scale": 0.0}),
        (ReadsClass, _set_class, {}),
        (ReadsArgument, lambda _, number: (number,), {}),
        (Counts, None, {"runs": 0}),
        (Closes, None, {}),
        (Keeps, None, {"kept": []}),
        (Draws, None, {}),
        (Iterates, None, {"scales": iter(range(100))}),
        (Statistics, None, {}),
        (WritesInput, None, {}),
    ],
)
def test_blocks_that_might_differ_run_every_time(block: type[Block], between: Any, config: Any) -> None:
    _check(Tower(block, between, **config), 0)


def test_blocks_under_a_mode_that_might_differ_run_every_time() -> None:
    _check(UnderMode(Block, _set_flag), 0)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("gpt2", 3),
        pytest.param("llama-8b", 3, marks=pytest.mark.matrix),
        pytest.param("bert", 3, marks=pytest.mark.matrix),
        pytest.param("vit", 3, marks=pytest.mark.matrix),
        pytest.param(
            "t5", 4, marks=pytest.mark.matrix
        ),  # of the encoder and of the decoder; both begin with another
        pytest.param("mixtral", 3, marks=pytest.mark.matrix),
    ],
)
def test_models_of_transformers(name: str, written: int) -> None:
    workload = load_workload(name, settings={"size": "tiny", "layers": "5"})
    unlike, counted = differences(workload.model, workload.example_inputs, loss_fn=workload.loss_fn)
    assert unlike == []
    assert counted.total() == written


def test_layers_of_two_kinds_in_turn_are_written_each_from_its_own_record() -> None:
    config = transformers.Qwen2Config(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
        use_sliding_window=True,
        sliding_window=4,
        layer_types=["full_attention", "sliding_attention"] * (LAYERS // 2),
    )
    model = build(transformers.Qwen2ForCausalLM, config, torch.float32, on_meta=False)
    unlike, counted = differences(model, example_batch(model, 16))
    assert unlike == []
    assert counted.total() == LAYERS - 3


class Twice(Tower):
    """Calls every block twice."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x).repeat(1, 1, 2))


def test_a_block_that_is_called_again_runs_again() -> None:
    _check(Twice(Block), LAYERS - 2)


def test_blocks_with_a_hook_or_a_shared_parameter_run() -> None:
    hooked = Tower(Block)
    hooked.layers[3].norm.register_forward_hook(lambda module, args, output: output * 2.0)  # type: ignore[operator, union-attr]
    _check(hooked, LAYERS - 3)
    tied = Tower(Block)
    tied.layers[4].up.weight = tied.layers[5].up.weight  # type: ignore[union-attr]
    _check(tied, LAYERS - 4)


def test_code_that_is_written_on_demand_is_written_when_the_graph_is_called() -> None:
    model, x = Tower(Block).double(), torch.randn(3, 5, 8, dtype=torch.float64)
    graph = trace(model, x, loss_fn=_loss)
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    (loss,) = graph.module(*(x if i.kind == "batch" else state[i.name] for i in graph.inputs))
    torch.testing.assert_close(loss, _loss(model(x), None), rtol=1e-12, atol=0.0)
