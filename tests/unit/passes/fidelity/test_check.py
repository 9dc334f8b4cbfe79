"""What export forgets is found by two steps of the user's module: refused with a line, or noted; nothing of it changes."""

from __future__ import annotations

import itertools
import random
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from cost_models.cluster import ClusterSpec
from partitioner import ModelError, Precision, UsageError, partition
from partitioner.models.as_graph import as_graph
from passes.fidelity.check import check_fidelity
from passes.graph.graph import OpGraph
from passes.timings import pass_times
from passes.trace.trace import trace

FILE = "test_check.py:"
STEP = {"of": 0}


class Model(nn.Module):
    """Two layers around what a test computes between them, and things that Python code keeps."""

    total = 0

    def __init__(self, middle: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.middle = middle
        self.calls = 0
        self.seen: list[Any] = []
        self.cache: dict[int, Tensor] = {}
        self.own = random.Random(3)
        self.numpys = np.random.default_rng(3)
        self.torchs = torch.Generator().manual_seed(3)
        self.average = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(self.middle(self, self.a(x))))  # type: ignore[no-any-return]


def squared(output: Tensor, batch: object) -> Tensor:
    return output.square().mean()


def checked(model: nn.Module, x: Tensor | None = None, **options: Any) -> OpGraph:
    """Trace and check ``model``; whatever comes of it, nothing may be left changed."""
    x = torch.randn(8, 6) if x is None else x
    before = photo(model)
    try:
        return as_graph(model, example_inputs=x, loss_fn=squared, **options)
    finally:
        assert photo(model) == before


def photo(model: nn.Module) -> dict[str, Any]:
    """Note everything that a check could leave behind."""
    found: dict[str, Any] = {
        "python": random.getstate(),
        "torch": torch.get_rng_state().tolist(),
        "step": dict(STEP),
    }
    found["numpy"] = repr(np.random.get_state())
    for path, module in model.named_modules():
        found[f"{path} trains"] = module.training
        found[f"{path} hooks"] = [list(table) for table in (module._backward_hooks, module._forward_hooks)]
        found[f"{path} numbers"] = {n: v for n, v in vars(module).items() if isinstance(v, int | float)}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[name] = (id(tensor), tensor.data_ptr(), tensor.tolist(), tensor.dtype)
        found[f"{name}.grad"] = (
            tensor.grad if tensor.grad is None else (id(tensor.grad), tensor.grad.tolist())
        )
        found[f"{name} hooks"] = list((tensor._backward_hooks or {}).values())
    if isinstance(model, Model):
        found["lists"] = (list(model.seen), dict(model.cache), model.average.tolist(), Model.total)
        found["generators"] = (model.own.getstate(), repr(model.numpys.bit_generator.state))
        found["generator"] = model.torchs.get_state().tolist()
    return found


def counting(m: Any, h: Tensor) -> Tensor:
    m.calls += 1
    return h * m.calls


def growing(m: Any, h: Tensor) -> Tensor:
    m.seen.append(1)
    return h * len(m.seen)


def dropping(m: Any, h: Tensor) -> Tensor:
    return h if random.random() < 0.02 else h * 2


def drawing_numpy(m: Any, h: Tensor) -> Tensor:
    return h * float(np.random.rand())


def drawing_own(m: Any, h: Tensor) -> Tensor:
    return h * m.own.random()


def drawing_numpys_own(m: Any, h: Tensor) -> Tensor:
    return h * float(m.numpys.uniform(1, 2))


def counting_a_global(m: Any, h: Tensor) -> Tensor:
    STEP["of"] += 1
    return h * STEP["of"]


def counting_the_class(m: Any, h: Tensor) -> Tensor:
    Model.total += 1
    return h * Model.total


def averaging(m: Any, h: Tensor) -> Tensor:
    m.average = 0.9 * m.average + 0.1 * h.detach().mean(0)
    return h - m.average


REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "counter": (counting, "calls: 0 -> 1"),
    "list": (growing, "seen: 0 -> 1 items"),
    "layer drop": (dropping, f"random.random is called in {FILE}"),
    "numpy": (drawing_numpy, f"numpy.random.rand is called in {FILE}"),
    "own generator": (drawing_own, "own: drew random numbers"),
    "numpy's own generator": (drawing_numpys_own, "numpys: drew random numbers"),
    "global": (counting_a_global, "STEP of"),
    "class attribute": (counting_the_class, "Model.total: 0 -> 1"),
    "running average": (averaging, "average: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_from_call_to_call_is_refused_by_name(name: str) -> None:
    middle, said = REFUSED[name]
    with pytest.raises(ModelError) as caught:
        checked(Model(middle))
    assert "at every call" in caught.value.what
    assert any(said in line for line in caught.value.because), caught.value.because
    assert any('check="off"' in way for way in caught.value.suggestions)


def test_the_line_that_changes_an_attribute_is_named() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.step = nn.Linear(6, 6), 0

        def forward(self, x: Tensor) -> Tensor:
            self.step += 1
            return self.layer(x) / self.step  # type: ignore[no-any-return]

    line = Counting.forward.__code__.co_firstlineno + 1
    with pytest.raises(ModelError, match=f"step: 0 -> 1, in {FILE}{line}"):
        checked(Counting())


def test_a_counter_in_the_loss_is_found() -> None:
    count = itertools.count(1)
    seen: list[int] = []

    def loss(output: Tensor, batch: object) -> Tensor:
        seen.append(next(count))
        return output.square().mean() * len(seen)

    with pytest.raises(ModelError, match="seen of"):
        as_graph(nn.Linear(6, 3), example_inputs=torch.randn(4, 6), loss_fn=loss)


def test_state_of_a_loss_belongs_into_the_model() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(3))

        def forward(self, output: Tensor, batch: object) -> Tensor:
            loss = (output - self.center).square().mean()
            self.center = 0.9 * self.center + 0.1 * output.detach().mean(0)
            return loss

    with pytest.raises(ModelError, match=r"loss_fn\.center: .*, in test_check\.py:\d+") as caught:
        as_graph(nn.Linear(6, 3), example_inputs=torch.randn(4, 6), loss_fn=Centred())
    assert caught.value.suggestions[0].startswith("make the loss function a module of the model")


def test_python_state_that_changes_nothing_is_let_through() -> None:
    def harmless(m: Any, h: Tensor) -> Tensor:
        m.calls += 1
        m.seen.append(float(m.calls))
        m.last = random.random()
        size = h.shape[1]
        if size not in m.cache:
            m.cache[size] = torch.arange(6.0)
        return h + m.cache[size]

    graph = checked(Model(harmless))
    assert any("calls: 0 -> 1" in note for note in graph.notes)
    (drawn,) = [note for note in graph.notes if "Python's random numbers" in note]
    assert f"random.random is called in {FILE}" in drawn
    assert drawn.endswith("others change nothing here")


def test_a_buffer_that_forward_replaces_is_still_there_in_backward() -> None:
    def queue(m: Any, h: Tensor) -> Tensor:
        similar = h @ m.bank.T
        m.bank = torch.cat([h.detach(), m.bank])[: len(m.bank)]
        return similar @ m.bank

    model = Model(queue)
    model.register_buffer("bank", torch.randn(12, 6))
    bank, values = model.bank, model.bank.clone()
    assert not any("compared" in note for note in checked(model).notes)
    assert model.bank is bank
    assert torch.equal(bank, values)


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_export_keeps_is_let_through(reentrant: bool) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        h = F.dropout(m.norm(h), 0.3, m.training)
        return checkpoint(lambda y: torch.tanh(y), h, use_reentrant=reentrant)  # type: ignore[no-any-return]

    model = Model(middle)
    model.a = nn.utils.parametrizations.weight_norm(model.a)
    model.b = nn.utils.parametrizations.spectral_norm(model.b)
    model.a.register_forward_hook(lambda module, args, output: output * 2)
    model.b.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    assert not any("compared" in note for note in checked(model).notes)


@pytest.mark.parametrize("samples", [1, 2, 8])
def test_noise_drawn_with_torch_is_let_through(samples: int) -> None:
    graph = checked(Model(lambda m, h: h + torch.randn_like(h)), torch.randn(samples, 6))
    assert graph.loss is not None


def test_an_example_without_values_is_drawn() -> None:
    def doubled(m: Any, h: Tensor) -> Tensor:
        h.register_hook(lambda gradient: gradient * 2)
        return h

    turned = torch.zeros(6, 8).T  # no view of it is flat
    for example in (torch.zeros(8, 6), turned, torch.empty(8, 6, device="meta")):
        with pytest.raises(ModelError, match="hooks change gradients"):
            checked(Model(doubled), example)


def double(module: nn.Module, given: Any, received: Any) -> Any:
    return tuple(None if gradient is None else gradient * 2 for gradient in given)


def double_before(module: nn.Module, received: Any) -> Any:
    return tuple(None if gradient is None else gradient * 2 for gradient in received)


@pytest.mark.parametrize("kind", ["tensor", "module", "module, before"])
def test_hooks_that_change_gradients_inside_are_refused(kind: str) -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        if kind == "tensor":
            h.register_hook(lambda gradient: gradient * 2)
        return h

    model = Model(middle)
    if kind == "module":
        model.b.register_full_backward_hook(double)
    elif kind == "module, before":
        model.b.register_full_backward_pre_hook(double_before)
    with pytest.raises(ModelError) as caught:
        checked(model)
    assert "hooks change gradients" in caught.value.what
    assert FILE in caught.value.because[0]
    assert any("opaque=" in way for way in caught.value.suggestions)
    if kind != "tensor":
        assert "module b" in caught.value.because[0]
        assert any('opaque=["b"]' in way for way in caught.value.suggestions)


def test_hooks_that_only_look_are_let_through_with_a_note() -> None:
    looked: list[float] = []

    def middle(m: Any, h: Tensor) -> Tensor:
        h.register_hook(lambda gradient: looked.append(float(gradient.norm())))
        return h

    model = Model(middle)
    model.b.register_full_backward_hook(lambda *_: None)
    (note,) = [note for note in checked(model).notes if note.startswith("hooks on gradients are not run")]
    assert note.endswith("they change no gradient here")
    assert "module b" in note


def test_loops_that_compile_themselves_are_compared_as_well() -> None:
    class Loop(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            def step(i: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                return i + 1, torch.tanh(nn.Linear.forward(self, x))

            looped: Tensor = while_loop(lambda i, x: i < 3, step, (torch.tensor(0), x))[1]
            return looped

    model = Model(lambda m, h: m.loop(h))
    model.loop = Loop(6, 6)
    (note,) = [note for note in checked(model).notes if "loop" in note]
    assert "runs whole" in note


def test_hooks_on_parameters_belong_to_a_plan() -> None:
    model = Model(lambda m, h: h)
    model.b.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    model.a.weight.register_hook(lambda gradient: None)

    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    model.a.weight.register_post_accumulate_grad_hook(halve)
    (note,) = checked(model).notes
    assert "a.weight, b.weight" in note


def test_a_hook_that_draws_random_numbers_is_refused() -> None:
    model = Model(lambda m, h: h)
    model.b.weight.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
    with pytest.raises(ModelError, match="draws random numbers"):
        checked(model)


def test_a_hook_registered_in_every_forward_is_found() -> None:
    def middle(m: Any, h: Tensor) -> Tensor:
        m.b.weight.register_hook(lambda gradient: gradient * 0.5)
        return h

    with pytest.raises(ModelError, match=r"b\.weight: 0 -> 1 hooks"):
        checked(Model(middle))


def test_an_optimizer_inside_backward_is_refused() -> None:
    model = Model(lambda m, h: h)

    def step(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.data.sub_(parameter.grad, alpha=0.1)

    model.b.weight.register_post_accumulate_grad_hook(step)
    with pytest.raises(ModelError) as caught:
        checked(model)
    assert "before the optimizer does" in caught.value.what
    assert FILE in caught.value.because[1]


def test_a_number_that_no_attribute_explains_is_found() -> None:
    middle: Callable[[Any, Tensor], Tensor] = lambda m, h: h * (time.perf_counter_ns() % 1000)  # noqa: E731
    with pytest.raises(ModelError, match="nothing of the model's attributes") as caught:
        checked(Model(middle))
    assert f"time is read in {FILE}{middle.__code__.co_firstlineno}" in caught.value.because


class CountedBackward(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        CountedBackward.calls += 1
        return gradients[0] / CountedBackward.calls


def test_a_counter_in_a_backward_is_named_with_its_line() -> None:
    with pytest.raises(ModelError) as caught:
        checked(Model(lambda m, h: CountedBackward.apply(h)))
    line = CountedBackward.backward.__code__.co_firstlineno + 2
    assert f"CountedBackward.calls: 0 -> 1, in {FILE}{line}" in caught.value.because
    assert CountedBackward.calls == 0


def test_complex_parameters_and_values_that_are_no_numbers_are_compared() -> None:
    class Complex(nn.Module):
        def __init__(self, bad: float) -> None:
            super().__init__()
            self.w, self.bad = nn.Parameter(torch.randn(3, dtype=torch.complex64)), bad

        def forward(self, x: Tensor) -> Tensor:
            z = torch.view_as_complex(x.reshape(-1, 3, 2)) * self.w.conj()
            return z.abs() * self.bad

    for bad in (1.0, float("nan"), float("inf")):
        assert checked(Complex(bad)).notes == ()


def test_gradients_that_a_user_has_accumulated_stay() -> None:
    model = Model(lambda m, h: m.norm(h))
    squared(model(torch.randn(8, 6)), None).backward()  # type: ignore[no-untyped-call]
    checked(model)
    assert model.a.weight.grad is not None


def test_off_trusts_the_trace() -> None:
    assert checked(Model(growing), check="off").loss is not None
    with pytest.raises(UsageError, match="'of'"):
        checked(Model(growing), check="of")


def test_a_model_without_values_has_its_draws_noted() -> None:
    with torch.device("meta"):
        model = Model(dropping)
    (note,) = as_graph(model, example_inputs=torch.randn(4, 6), loss_fn=squared).notes
    assert f"random.random is called in {FILE}" in note
    assert note.endswith("keeps those of its first call")


def test_a_model_without_values_is_not_run() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 3))
    graph = as_graph(model, example_inputs=torch.randn(4, 6), loss_fn=squared)
    assert graph.notes == ()


def test_a_step_that_fails_on_the_example_is_noted() -> None:
    model = nn.Sequential(nn.Embedding(5, 6), nn.Linear(6, 3))
    graph = as_graph(model, example_inputs=torch.full((4, 2), 7), loss_fn=squared)
    (note,) = graph.notes
    assert "IndexError" in note


@pytest.mark.parametrize("wrong", [False, True])
def test_a_model_that_does_not_run_in_its_own_types_is_compared_in_float64(wrong: bool) -> None:
    weights = torch.linspace(0.5, 2.0, 3, dtype=torch.float64)
    model, x = Model(growing if wrong else lambda m, h: m.norm(h)), torch.randn(8, 6)

    def loss(output: Tensor, batch: object) -> Tensor:
        return F.cross_entropy(output, output.argmax(-1), weight=weights)

    before = photo(model)
    if wrong:
        with pytest.raises(ModelError, match="seen: 0 -> 1 items"):
            as_graph(model, example_inputs=x, loss_fn=loss)
    else:
        notes = as_graph(model, example_inputs=x, loss_fn=loss).notes
        assert not any("compared" in note for note in notes)
    assert photo(model) == before


def test_a_trace_of_another_precision_is_compared_in_float64() -> None:
    precision = Precision(compute=torch.bfloat16, master=torch.float32)
    assert not any(
        "compared" in note for note in checked(Model(lambda m, h: m.norm(h)), precision=precision).notes
    )
    with pytest.raises(ModelError, match="at every call"):
        checked(Model(growing), precision=precision)


def test_a_trace_that_lost_something_is_refused() -> None:
    """A trace of another loss stands for whatever else a trace may lose."""
    model, x = Model(lambda m, h: h), torch.randn(8, 6)
    graph = trace(model, x, loss_fn=lambda output, batch: output.square().mean() * 1.001)
    with pytest.raises(ModelError, match="computes something else"):
        check_fidelity(graph, model, x, squared)


def test_the_check_is_a_pass_with_its_seconds_and_runs_once_per_trace() -> None:
    model, x = Model(lambda m, h: h), torch.randn(8, 6)
    with pass_times() as times:
        graph = as_graph(model, example_inputs=x, loss_fn=squared)
        for strategy in ("layer", "feature"):
            partition(graph, ClusterSpec.local(2), strategy=strategy)
    assert [entry.name for entry in times].count("fidelity") == 1


def test_partition_refuses_too() -> None:
    with pytest.raises(ModelError, match="at every call"):
        partition(
            Model(counting),
            ClusterSpec.local(2),
            example_inputs=torch.randn(8, 6),
            loss_fn=squared,
            strategy="layer",
        )


@torch.library.custom_op("partitioner_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """An op without a backward."""
    return x * 2


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("not today")


@pytest.mark.parametrize(
    ("middle", "said"),
    [
        (lambda model, x: doubled(x), r"partitioner_tests.doubled.default, called in test_check.py:\d+"),
        (lambda model, x: Failing.apply(x), r"test_check.py:\d+: ValueError: not today"),
    ],
    ids=["an op without a backward", "a backward that raises"],
)
def test_a_backward_that_fails_on_the_example_is_refused(
    middle: Callable[[Any, Tensor], Tensor], said: str
) -> None:
    with pytest.raises(ModelError, match="backward of Model fails on the example") as refused:
        checked(Model(middle))
    assert re.search(said, str(refused.value))
