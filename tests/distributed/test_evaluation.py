"""``eval_step`` and ``forward`` of a deployed plan equal the whole model in evaluation mode, and change nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cost_models.cluster import ClusterSpec
from partitioner import Plan, Workload, partition
from partitioner.batches.part_batch import AbsentBatch
from partitioner.evaluation import graphs as evaluation_graphs
from passes.graph.graph import OpGraph
from passes.trace.batch import flatten_batch
from passes.trace.trace import trace
from runtime.ranks.launch import WorkerError, WorkerPool
from tests.support.matrix import thinned

WIDTH, SAMPLES, MICROBATCHES = 6, 8, 4
PINS = {"first": 0, "norm": 0, "second": 1, "third": 2, "last": 3}


class Net(nn.Module):
    """Batch norm, dropout, a parameter that training does not use, and outputs of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.second, self.third, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.only_in_evaluation = nn.Parameter(torch.full((WIDTH,), 0.5))
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        first = self.drop(torch.tanh(self.norm(self.first(x))))
        second = torch.tanh(self.second(first if mask is None else first * mask))
        third = self.drop(torch.relu(self.third(second)))
        logits = self.last(third)
        if self.training:
            return {"logits": logits}
        logits = logits + self.only_in_evaluation
        return {
            "logits": logits,
            "hidden": (first, {"second": second}),
            "again": logits,
            "input": x,
            "table": self.table,
            "weight": self.last.weight,
            "turned": second.transpose(0, 1),
            "best": logits.argmax(-1),
            "large": (second > 0).to(torch.bool),
            "phase": torch.complex(second, -second).conj(),
            "empty": second[:, :0],
            "mean": second.mean(0),
            "numbers": torch.arange(4) * 2,
        }


def loss_fn(output: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    loss = (output["logits"] - batch["y"]).square().mean()
    return loss, {"size": output["logits"].abs().mean()}


def model(kind: type[nn.Module] = Net) -> nn.Module:
    made = kind().double()
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(number))
            parameter.copy_(drawn.double() * 0.5)
    return made


def batch(samples: int = SAMPLES, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(2, samples, WIDTH, generator=generator, dtype=torch.float64)
    return {"x": x, "y": y}


def workload() -> Workload:
    return Workload(model(), batch(), loss_fn, "net")


@pytest.fixture(scope="module")
def traced() -> OpGraph:
    """The training trace of ``workload()``: one for all plans."""
    made = workload()
    return trace(made.model, made.example_inputs, loss_fn=made.loss_fn, name=made.name)


def made_plan(made: Workload | OpGraph, ranks: int, schedule: str, pins: Mapping[str, int] | None) -> str:
    kept = None if pins is None else {name: stage for name, stage in pins.items() if stage < ranks}
    return partition(
        made,
        ClusterSpec.local(ranks),
        batch_size=SAMPLES,
        microbatches=MICROBATCHES,
        schedule=schedule,
        pins=kept,
        strategy="layer",
    ).model_dump_json()


def trained(made: Workload, steps: int = 1) -> nn.Module:
    """The model after as many steps as ``run`` takes: for batch norm's statistics, which no weight changes."""
    for _ in range(steps):
        for piece in batch()["x"].tensor_split(MICROBATCHES):
            made.model.train()(piece)
    return made.model.eval()


# ------------------------------------------------------------------------------------------------------
# A model with every kind of output, on every plan

SIZES = (8, 1, 21)


def run(plan_json: str) -> list[dict[str, Any]]:
    """In a worker: evaluations of several sizes, after a training step that moved the running statistics."""
    found = []
    options = {"optimizer": torch.optim.SGD, "optimizer_kwargs": {"lr": 0.0}}
    with Plan.from_json(plan_json).deploy(workload(), timeout_seconds=30.0, **options) as engine:
        engine.train_step(batch())
        buffers = {name: buffer.clone() for name, buffer in engine.buffers.items()}
        for samples in SIZES:
            data = batch(samples, seed=samples)
            on_all = engine.eval_step(as_loaded(data, samples, engine), gather="all")
            on_first = engine.eval_step(data, gather="rank0")
            without = engine.eval_step(data)
            assert without.outputs is None
            assert without.loss == on_all.loss == on_first.loss
            assert not on_all.loss.requires_grad
            found.append(
                {
                    "loss": on_all.loss,
                    "metrics": on_all.metrics,
                    "samples": (on_all.samples, on_all.tokens),
                    "all": on_all.outputs,
                    "rank0": on_first.outputs,
                    "forward": engine.forward({"x": data["x"]}),
                }
            )
        assert engine.step == 1
        assert all(torch.equal(buffer, buffers[name]) for name, buffer in engine.buffers.items())
        assert len(engine._evaluator._graphs._known) == 2, (
            "one graph for every batch size, and one for forward"
        )
        weight = found[0]["all"]["weight"]
        assert all(weight.data_ptr() != p.data_ptr() for p in engine.parameters.values())
    return found


def as_loaded(data: dict[str, Tensor], samples: int, engine: Any) -> Any:
    """What a data loader may give this rank: nothing where no input is read, or not all."""
    if engine.plan.world_size < 3:
        return data
    rank, last = torch.distributed.get_rank(), engine.plan.world_size - 1
    if rank == 0:
        return {"x": data["x"]}
    return {"y": data["y"]} if rank == last else AbsentBatch(samples, engine._graph)


@pytest.mark.parametrize(
    ("ranks", "schedule", "pins"),
    [
        (1, "auto", None),
        (2, "interleaved", None),
        pytest.param(2, "zb-v", None, marks=pytest.mark.matrix),
        pytest.param(3, "1f1b", PINS, marks=pytest.mark.matrix),
        (4, "gpipe", PINS),
    ],
)
def test_equals_the_model_in_evaluation_mode(
    pool: WorkerPool, traced: OpGraph, ranks: int, schedule: str, pins: Mapping[str, int] | None
) -> None:
    text = made_plan(traced, ranks, schedule, pins)
    results = pool.run(run, text, world_size=ranks, timeout_seconds=120.0)
    reference = trained(workload())
    for number, samples in enumerate(SIZES):
        data = batch(samples, seed=samples)
        with torch.no_grad():
            output = reference(data["x"])
            loss, metrics = loss_fn(output, data)
        expected = flatten_batch(output)
        for rank, found in enumerate(result[number] for result in results):
            torch.testing.assert_close(found["loss"], loss, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(found["metrics"], metrics, rtol=1e-12, atol=1e-12)
            assert found["samples"] == (samples, None)
            assert_outputs(found["all"], expected, samples)
            for gathered in ("rank0", "forward"):
                if rank == 0:
                    assert_outputs(found[gathered], expected, samples)
                else:
                    assert found[gathered] is None


def assert_outputs(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], samples: int) -> None:
    assert list(found) == list(expected)
    assert found["again"] is found["logits"]
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        if name == "mean":  # it has no batch dimension: one per micro-batch
            count = min(samples, max(MICROBATCHES, -(-samples * MICROBATCHES // SAMPLES)))
            pieces = expected["hidden.1.second"].tensor_split(count)
            tensor = torch.stack([piece.mean(0) for piece in pieces])
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------------
# Evaluating is not noticed by training


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        noisy = nn.functional.dropout(self.norm(self.a(x)), 0.3, training=self.training)
        return self.b(nn.functional.dropout(noisy, 0.2)).square().mean()  # drops in evaluation mode too


def training_with_evaluations(plan_json: str, evaluates: bool) -> Any:
    made = Workload(model(Dropped), {"x": batch()["x"]}, None, "dropped")
    losses = []
    torch.manual_seed(5)
    with Plan.from_json(plan_json).deploy(made, timeout_seconds=30.0, learning_rate=0.1) as engine:
        for seed in range(3):
            engine.forward_backward({"x": batch(seed=seed)["x"]})
            if evaluates:
                engine.eval_step({"x": batch(5, seed=7)["x"]}, gather="all")
            engine.optimizer.step()
            losses.append(engine.last_step.loss)
            if evaluates:
                engine.forward({"x": batch(3, seed=8)["x"]})
        state = {**engine.parameters, **engine.buffers}
        return losses, {n: t.detach().clone() for n, t in state.items()}, torch.random.get_rng_state()


def test_training_goes_on_bit_for_bit(pool: WorkerPool) -> None:
    made = Workload(model(Dropped), {"x": batch()["x"]}, None, "dropped")
    text = made_plan(made, 2, "1f1b", {"a": 0, "b": 1})
    plain, evaluating = (
        pool.run(training_with_evaluations, text, evaluates, world_size=2, timeout_seconds=90.0)
        for evaluates in (False, True)
    )
    for without, with_ in zip(plain, evaluating, strict=True):
        assert without[0] == with_[0]
        assert without[1].keys() == with_[1].keys()
        assert all(torch.equal(without[1][name], with_[1][name]) for name in without[1])
        assert torch.equal(without[2], with_[2])


# ------------------------------------------------------------------------------------------------------
# Hugging Face models


def hf_workload(kind: str) -> Workload:
    import transformers

    tiny = {"vocab_size": 19, "use_cache": False}
    torch.manual_seed(0)
    ids = torch.randint(1, 19, (SAMPLES, 7), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    for row in range(SAMPLES):  # uneven numbers of labels that count
        labels[row, : row % 6] = -100
    labels[1] = -100
    data = {"input_ids": ids, "labels": labels}
    if kind == "llama":
        config = transformers.LlamaConfig(
            hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, **tiny
        )
        made = transformers.LlamaForCausalLM(config)
    elif kind == "gpt2":
        config = transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, n_positions=16, **tiny)
        made = transformers.GPT2LMHeadModel(config)
        data["attention_mask"] = torch.ones_like(ids)
    else:
        config = transformers.T5Config(
            d_model=8, d_kv=4, d_ff=12, num_layers=1, num_heads=2, decoder_start_token_id=0, **tiny
        )
        made = transformers.T5ForConditionalGeneration(config)
    return Workload(made.double(), data, None, kind)


HF_PINS = {
    "llama": {"model.layers.0": 0, "model.layers.1": 1},
    "gpt2": {"transformer.h.0": 0, "transformer.h.1": 1},
    "t5": {"encoder.block.0": 0, "decoder.block.0": 1},
}


LARGE = 11
"""Samples of a batch that runs in two rounds."""


def part_of(data: Mapping[str, Tensor], samples: int) -> dict[str, Tensor]:
    return {name: torch.cat([tensor, tensor])[:samples] for name, tensor in data.items()}


def run_hf(plan_json: str, kind: str) -> Any:
    made = hf_workload(kind)
    data = made.example_inputs
    inputs = {name: tensor for name, tensor in data.items() if name != "labels"}
    if kind == "t5":
        inputs["decoder_input_ids"] = data["input_ids"][:, :5]
    with Plan.from_json(plan_json).deploy(made, timeout_seconds=30.0) as engine:
        evaluated = [engine.eval_step(part_of(data, n), gather="all") for n in (LARGE, 3)]
        if kind != "gpt2":  # one more trace is enough for each model
            return evaluated, engine.forward(inputs, gather="all"), None
        shorter = {name: tensor[:, 2:] for name, tensor in data.items()}  # not contiguous
        return evaluated, None, engine.eval_step(shorter)


@pytest.mark.parametrize(("kind", "ranks"), thinned([("llama", 2), ("gpt2", 2), ("t5", 2)], []))
def test_models_of_transformers(pool: WorkerPool, kind: str, ranks: int) -> None:
    made = hf_workload(kind)
    text = made_plan(made, ranks, "1f1b", HF_PINS[kind])
    loss_rtol = 1e-12 if kind == "t5" else 1e-6  # the others compute their loss in float32
    results = pool.run(run_hf, text, kind, world_size=ranks, timeout_seconds=200.0)
    reference, data = made.model.eval(), made.example_inputs
    inputs = {name: tensor for name, tensor in data.items() if name != "labels"}
    if kind == "t5":
        inputs["decoder_input_ids"] = data["input_ids"][:, :5]
    with torch.no_grad():
        expected = [reference(**part_of(data, n)) for n in (LARGE, 3)]
        plain = reference(**inputs)
        shorter = reference(**{name: tensor[:, 2:].clone() for name, tensor in data.items()})
    for evaluated, forwarded, at_length_5 in results:
        for found, want in zip(evaluated, expected, strict=True):
            torch.testing.assert_close(found.loss, want.loss.double(), rtol=loss_rtol, atol=0.0)
            torch.testing.assert_close(found.outputs["logits"], want.logits, rtol=1e-10, atol=1e-12)
            assert "loss" not in found.outputs
        if kind != "gpt2":
            torch.testing.assert_close(forwarded["logits"], plain.logits, rtol=1e-10, atol=1e-12)
        else:
            torch.testing.assert_close(at_length_5.loss, shorter.loss.double(), rtol=loss_rtol, atol=0.0)


# ------------------------------------------------------------------------------------------------------
# Evaluation graphs that do not run like training


class Reversed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        steps: Sequence[Callable[[Tensor], Tensor]] = (self.first, self.last)
        for step in steps if self.training else reversed(steps):
            x = torch.tanh(step(x))
        return x @ (self.first.weight * self.last.weight) if not self.training else x


def run_reversed(plan_json: str) -> Any:
    made = Workload(model(Reversed), batch(), lambda output, data: (output - data["y"]).square().mean())
    with Plan.from_json(plan_json).deploy(made, timeout_seconds=30.0) as engine:
        return engine.eval_step(batch(5), gather="all")


@pytest.mark.parametrize("fix", [None, "pipeline=2 tensor=2 borders=last"])
def test_modules_in_another_order(pool: WorkerPool, fix: str | None) -> None:
    """Values go back from the last stage to the first: from rank to rank, and from group to group."""
    made = Workload(model(Reversed), batch(), lambda output, data: (output - data["y"]).square().mean())
    if fix is None:
        text = made_plan(made, 2, "1f1b", {"first": 0, "last": 1})
    else:
        given: dict[str, Any] = {"fix": fix, "batch_size": SAMPLES, "microbatches": MICROBATCHES}
        text = partition(made, ClusterSpec.local(4), strategy="hybrid", **given).model_dump_json()
    data = batch(5)
    expected = made.model.eval()(data["x"])
    for found in pool.run(run_reversed, text, world_size=2 if fix is None else 4, timeout_seconds=90.0):
        torch.testing.assert_close(found.outputs["output"], expected.detach(), rtol=1e-12, atol=1e-12)
        loss = (expected - data["y"]).square().mean().detach()
        torch.testing.assert_close(found.loss, loss, rtol=1e-12, atol=1e-12)


# ------------------------------------------------------------------------------------------------------
# Ranks that loaded a part of the batch, or nothing of it, and sequences of other lengths


class Tokens(nn.Module):
    """As models of transformers: every input may be left out, and labels make the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, 11)

    def forward(
        self, ids: Tensor | None = None, mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Any:
        assert ids is not None
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
            hidden = hidden if mask is None else hidden * mask[..., None]
        logits = self.head(hidden)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def tokens(length: int, samples: int = SAMPLES) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(length)
    ids, labels = torch.randint(0, 11, (2, samples, length), generator=generator)
    labels[0, : length // 2] = -100
    return {"ids": ids, "labels": labels}


def masked(length: int) -> dict[str, Tensor]:
    found = tokens(length)
    return {**found, "mask": (found["ids"] > 3).double()}


LENGTHS = (5, 4, 5, 4)
TOKEN_PINS = {"embed": 0, "layers.0": 0, "layers.1": 1, "head": 2}


def run_lengths(plan_json: str) -> Any:
    made, rank = Workload(model(Tokens), tokens(5), None, "tokens"), torch.distributed.get_rank()
    found: dict[str, Any] = {}

    def part(data: dict[str, Tensor]) -> Any:
        names = (("ids", "mask"), ("mask",), ("labels", "mask"))[rank]
        mine = {name: tensor for name, tensor in data.items() if name in names}
        return mine or AbsentBatch(len(data["ids"]), engine._graph)

    with Plan.from_json(plan_json).deploy(made, timeout_seconds=20.0) as engine:
        graphs = engine._evaluator._graphs
        found["lengths"] = [engine.eval_step(part(tokens(length)), gather="all") for length in LENGTHS]
        found["known"] = len(graphs._known)
        found["short"] = engine.eval_step(part(tokens(4, samples=3)))
        found["masked"] = engine.eval_step(part(masked(5)))
        found["again"] = engine.eval_step(part(tokens(5)))
        found["known at the end"] = len(graphs._known)
        evaluation_graphs.MOST_GRAPHS, before = 2, evaluation_graphs.MOST_GRAPHS
        try:
            found["evicting"] = [engine.eval_step(part(tokens(length))) for length in (6, 4)]
        finally:
            evaluation_graphs.MOST_GRAPHS = before
        found["loaded"] = len(graphs._known), len(engine.executor._loaded)
    return found


def test_parts_of_batches_of_other_lengths(pool: WorkerPool) -> None:
    made = Workload(model(Tokens), tokens(5), None, "tokens")
    reference = made.model.eval()

    def expected(data: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            loss: Tensor = reference(**data)["loss"]
        return loss

    text = made_plan(made, 3, "1f1b", TOKEN_PINS)
    for found in pool.run(run_lengths, text, world_size=3, timeout_seconds=120.0):
        exactly = {"rtol": 1e-12, "atol": 1e-12}
        for length, output in zip(LENGTHS, found["lengths"], strict=True):
            torch.testing.assert_close(output.loss, expected(tokens(length)), **exactly)
            assert output.outputs["logits"].shape == (SAMPLES, length, 11)
        assert found["known"] == len(set(LENGTHS))
        torch.testing.assert_close(found["short"].loss, expected(tokens(4, samples=3)), **exactly)
        torch.testing.assert_close(found["masked"].loss, expected(masked(5)), **exactly)
        torch.testing.assert_close(found["again"].loss, expected(tokens(5)), **exactly)
        assert found["known at the end"] == len(set(LENGTHS)) + 1
        for length, output in zip((6, 4), found["evicting"], strict=True):
            torch.testing.assert_close(output.loss, expected(tokens(length)), **exactly)
        assert found["loaded"] == (2, 3)
        whole = [tokens(5), tokens(4, samples=3)]
        counts = [int((data["labels"] != -100).sum()) for data in whole]
        evaluated = [found["lengths"][0], found["short"]]
        assert [output.tokens.item() for output in evaluated] == counts
        assert [output.samples for output in evaluated] == [SAMPLES, 3]
        assert not evaluated[0].metrics


# ------------------------------------------------------------------------------------------------------
# Refusals


class Pairs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(torch.tanh(self.a(x)))
        return y @ y.transpose(0, 1)


def run_pairs(plan_json: str, case: str) -> Any:
    made = Workload(model(Pairs), {"x": batch()["x"]}, lambda output, _: output.diagonal().mean())
    with Plan.from_json(plan_json).deploy(made, timeout_seconds=10.0) as engine:
        if case == "pairs":
            assert engine.eval_step({"x": batch(6)["x"]}).outputs is None
            return engine.forward({"x": batch(1)["x"]}), engine.forward({"x": batch(6)["x"]})
        if case == "word":
            return engine.eval_step({"x": batch()["x"]}, gather="everywhere")
        if case == "type":
            return engine.eval_step({"x": batch()["x"].float()})
        if case == "mixed":
            if torch.distributed.get_rank():
                return engine.forward({"x": batch()["x"]})
            return engine.eval_step({"x": batch()["x"]})
        length = 5 if torch.distributed.get_rank() else 6
        return engine.forward({"x": batch(length)["x"]})


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("pairs", "several of its dimensions grow with the batch"),
        ("mixed", r"ranks cannot agree on what to evaluate(.|\n)*rank 1: forward of a batch of x: \(8, 6\)"),
        ("word", "gather is one of None, 'rank0', 'all'"),
        ("ranks", r"ranks cannot agree on what to evaluate(.|\n)*rank 1: forward of a batch of x: \(5, 6\)"),
    ],
)
def test_what_cannot_be_had_is_refused(pool: WorkerPool, case: str, said: str) -> None:
    made = Workload(model(Pairs), {"x": batch()["x"]}, lambda output, _: output.diagonal().mean())
    text = made_plan(made, 2, "1f1b", {"a": 0, "b": 1})
    with pytest.raises(WorkerError, match=said):
        pool.run(run_pairs, text, case, world_size=2, timeout_seconds=60.0)
