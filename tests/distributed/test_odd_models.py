"""Models that are legal and unusual, cut at random places under several schedules: each must compute what it computed.

Every case once broke something: a crash, a wrong gradient, or a verification that blamed the plan for its own fault.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cost_models.cluster import ClusterSpec
from partitioner import ModelError, Workload, partition, trace
from partitioner.verify.verify import verify_plan
from passes.graph.graph import OpGraph
from passes.graph.recomputed import recomputed_ops
from passes.graph.state import colocated
from runtime.ranks.launch import WorkerPool

RANKS = 3


class Odd(nn.Module):
    """Named parts and a forward over them."""

    def __init__(self, forward: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self._run = forward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self._run(self, x)


def square(width: int = 6, out: int = 6) -> nn.Linear:
    return nn.Linear(width, out)


def squared(output: Tensor, batch: object) -> Tensor:
    return (output.abs() ** 2).mean()


def floats(*shape: int) -> Tensor:
    return torch.randn(*shape)


def tokens() -> Tensor:
    return torch.randint(0, 11, (8, 5))


def shared_batch_norm() -> Workload:
    """One normalization at two places; a micro-batch of the plan's own sizes, the smallest of two samples."""
    bn = nn.BatchNorm1d(6)
    run = lambda m, x: m.c(m.bn(m.b(torch.tanh(m.bn(m.a(x))))))  # noqa: E731
    return Workload(Odd(run, a=square(), b=square(), c=square(), bn=bn), floats(8, 6), squared)


def buffer_written_but_not_read() -> Workload:
    """Spectral norm's ``_u`` is overwritten without being read; ``seen`` as well."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        m.seen.copy_(h.detach().mean(0))
        m.constant.fill_(3.0)
        return m.b(h.tanh())

    a = nn.utils.parametrizations.spectral_norm(square())
    return Workload(
        Odd(run, a=a, b=square(), seen=torch.zeros(6), constant=torch.zeros(2)), floats(8, 6), squared
    )


def lazily_conjugated_values() -> Workload:
    """Conjugates and their imaginary parts carry their sign beside their memory, which a message must not forget."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        z = torch.view_as_complex(h.reshape(h.shape[0], 3, 2).contiguous())
        c = z.conj()
        k, i = m.b(h)[:, :3], c.imag
        return torch.cat(
            [k * i, (torch.fft.fft(c) * z).imag, (c * m.w).real + k.argmax(-1, keepdim=True)], -1
        )

    w = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    return Workload(Odd(run, a=square(), b=square(), w=w), floats(8, 6), squared)


def complex_parameter_everywhere() -> Workload:
    def run(m: Any, x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.reshape(-1, 3, 2)) * m.w.conj()
        return (z @ torch.diag(m.w) * m.w).abs()

    return Workload(Odd(run, w=nn.Parameter(torch.randn(3, dtype=torch.complex64))), floats(8, 6), squared)


def sparse_embedding_everywhere() -> Workload:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.c(m.e(x) * m.e((x + 1) % 11).tanh()).tanh() * m.e(x.flip(1))

    return Workload(Odd(run, e=nn.Embedding(11, 6, sparse=True), c=square()), tokens(), squared)


def sparse_embedding_tied_to_a_head() -> Workload:
    run = lambda m, x: F.linear(m.c(m.e(x)).tanh(), m.e.weight)  # noqa: E731
    return Workload(Odd(run, e=nn.Embedding(11, 6, sparse=True), c=square()), tokens(), squared)


def dropout_inside_attention_and_recurrence() -> Workload:
    run = lambda m, x: m.c(m.r(m.e(m.a(x)))[0])  # noqa: E731
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.4, batch_first=True)
    parts = {"e": nn.TransformerEncoder(layer, 2), "r": nn.LSTM(6, 6, 2, dropout=0.5, batch_first=True)}
    return Workload(Odd(run, a=square(), c=square(), **parts), floats(8, 5, 6), squared)


def weight_norm_of_old() -> Workload:
    """Leaves a computed, non-leaf weight in the module: a deep copy refuses it."""
    with pytest.warns(FutureWarning):
        a = nn.utils.weight_norm(square())
    return Workload(Odd(lambda m, x: m.b(m.a(x).tanh()), a=a, b=square()), floats(8, 6), squared)


def reentrant_checkpoint_before_a_layer() -> Workload:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.c(checkpoint(lambda y: m.b(y).tanh(), m.a(x), use_reentrant=True))

    return Workload(Odd(run, a=square(), b=square(), c=square()), floats(8, 6), squared)


def nothing_trained() -> Workload:
    model = nn.Sequential(*(square() for _ in range(4))).requires_grad_(False)
    return Workload(model, floats(8, 6), squared)


def tensors_as_plain_attributes() -> Workload:
    model = Odd(lambda m, x: m.b(m.a(x) @ m.plain), a=square(), b=square())
    model.plain = nn.Parameter(floats(6, 6)).detach()
    return Workload(model, floats(8, 6), squared)


def a_queue_a_pointer_and_an_average() -> Workload:
    """As momentum contrast keeps them: read, written in place and under no_grad, an integer among them."""

    def run(m: Any, x: Tensor) -> Tensor:
        q = F.normalize(m.m(m.q(x)), dim=1)
        with torch.no_grad():
            k = F.normalize(m.k(x), dim=1)
        scores = torch.cat([(q * k).sum(1, keepdim=True), q @ m.queue.clone()], 1)
        with torch.no_grad():
            m.queue.copy_(torch.cat([k.mean(0)[:, None], m.queue[:, :-1]], 1))
            m.pointer[0] = (m.pointer[0] + 1) % 10
            m.average.mul_(0.9).add_(0.1 * q.mean(0))
        return scores.log_softmax(-1)[:, 0]

    buffers = {"queue": floats(4, 10), "pointer": torch.zeros(1, dtype=torch.long), "average": torch.zeros(4)}
    parts = {"q": square(6, 4), "k": square(6, 4).requires_grad_(False), "m": square(4, 4)}
    return Workload(Odd(run, **parts, **buffers), floats(8, 6), squared)


def frozen_base_with_adapters() -> Workload:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.base[1](m.base[0](x).tanh()).tanh()
        return m.base[3]((m.base[2](h) + m.up(m.down(h))).tanh())

    base = nn.Sequential(*(square() for _ in range(4))).requires_grad_(False)
    return Workload(Odd(run, base=base, down=square(6, 2), up=square(2, 6)), floats(8, 6), squared)


def one_buffer_in_two_modules() -> Workload:
    """Written under one name and read under the other; and an input that requires a gradient."""

    def run(m: Any, x: Tensor) -> Tensor:
        h = m.a(x)
        m.seen += h.detach().mean(0)
        return m.b(h) * m.b.seen

    model = Odd(run, a=square(), b=square(), seen=torch.zeros(6))
    model.b.register_buffer("seen", model.seen)
    return Workload(model, floats(8, 6).requires_grad_(), squared)


CASES: list[tuple[Callable[[], Workload], dict[str, Any]]] = [
    (shared_batch_norm, {}),
    (buffer_written_but_not_read, {}),
    (lazily_conjugated_values, {}),
    (complex_parameter_everywhere, {}),
    (sparse_embedding_everywhere, {"optimizer_memory": "sgd"}),
    (sparse_embedding_tied_to_a_head, {}),
    (dropout_inside_attention_and_recurrence, {}),
    (weight_norm_of_old, {}),
    (reentrant_checkpoint_before_a_layer, {}),
    (nothing_trained, {}),
    (tensors_as_plain_attributes, {}),
    (a_queue_a_pointer_and_an_average, {}),
    (frozen_base_with_adapters, {}),
    (one_buffer_in_two_modules, {}),
]


def random_pins(graph: OpGraph, stages: int, chance: random.Random) -> dict[str, int]:
    """A stage for every op: contiguous but for some that jump ahead, then raised until no edge leads back."""
    recomputed = recomputed_ops(graph)
    ops = [node for node in graph.ops if node.name not in recomputed]
    cuts = sorted(chance.sample(range(1, len(ops)), min(stages - 1, len(ops) - 1)))
    stage_of = {node.name: sum(cut <= position for cut in cuts) for position, node in enumerate(ops)}
    for name in stage_of:
        if chance.random() < 0.15:
            stage_of[name] = chance.randrange(stages)
    groups = [[name for name in group if name in stage_of] for group in colocated(graph)]
    before: dict[str, int] = {}
    while before != stage_of:
        before = dict(stage_of)
        for node in ops:
            sources = (stage_of[source.name] for source in node.all_input_nodes if source.name in stage_of)
            stage_of[node.name] = max([stage_of[node.name], *sources])
        for group in groups:
            stage_of.update(dict.fromkeys(group, max((stage_of[name] for name in group), default=0)))
    used = sorted(set(stage_of.values()))
    return {name: used.index(stage) for name, stage in stage_of.items()}


def snapshot(model: nn.Module) -> list[object]:
    """What a user can see of a model: tensors by identity and value, flags, hooks, attributes."""
    tensors = [(n, id(t), t.detach().clone().tolist()) for n, t in model.state_dict(keep_vars=True).items()]
    modules = [
        (m.training, sorted(vars(m)), len(m._forward_hooks), len(m._backward_hooks)) for m in model.modules()
    ]
    return [tensors, modules, [p.grad for p in model.parameters()]]


SCHEDULES = ("1f1b", "zb-h1", "gpipe")


@pytest.mark.parametrize(
    ("make", "options", "seed"),
    [
        pytest.param(*case, seed, marks=[] if seed == number % 3 else pytest.mark.matrix)
        for number, case in enumerate(CASES)
        for seed in range(3)
    ],
    ids=lambda value: SCHEDULES[value] if isinstance(value, int) else getattr(value, "__name__", ""),
)
def test_an_odd_model_computes_what_it_computed(
    make: Callable[[], Workload], options: dict[str, Any], seed: int, pool: WorkerPool
) -> None:
    """Under one of the schedules and random pins; under all of them in the matrix."""
    torch.manual_seed(0)
    workload = make()
    before = snapshot(workload.model)
    graph = trace(workload.model, workload.example_inputs, loss_fn=workload.loss_fn)
    plan = partition(
        graph,
        ClusterSpec.local(RANKS),
        batch_size=7,
        microbatches=3,
        schedule=SCHEDULES[seed],
        pins=random_pins(graph, RANKS, random.Random(1 + seed % 2)),  # both cut every model
        **{"strategy": "layer", **options},
    )
    assert len(plan.stages) > 1
    report = verify_plan(plan, workload, pool=pool, graph=graph)
    report.raise_if_different()
    assert report.samples == 7
    assert not any("random" in note and "may differ" in note for note in report.notes)
    assert snapshot(workload.model) == before


def test_what_the_unpartitioned_model_cannot_do_is_not_blamed_on_the_plan(pool: WorkerPool) -> None:
    def positive(m: Any, x: Tensor) -> Tensor:
        torch._assert_async((x > 1e3).all(), "no large numbers")
        return m.b(m.a(x))

    workload = Workload(Odd(positive, a=square(), b=square()), floats(8, 6), squared, "assertion")
    plan = partition(workload, ClusterSpec.local(2), batch_size=4, microbatches=2, strategy="layer")
    with pytest.raises(ModelError, match="the unpartitioned model fails on its own") as caught:
        plan.verify(workload, pool=pool)
    assert "no large numbers" in str(caught.value)
