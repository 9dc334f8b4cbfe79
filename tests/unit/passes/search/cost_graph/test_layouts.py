"""Feature-wise layouts of profiles: the cut against all choices, prices against counted elements, the known choice."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest

from cost_models.communication import (
    AlphaBeta,
    all_to_all_seconds,
    ring_all_gather_seconds,
    ring_all_reduce_seconds,
)
from cost_models.errors import GraphError, InternalError
from partitioner.cost_graphs.pipedream import PipeDreamProfile
from partitioner.cost_graphs.plan_layouts import kind_of, layout_problem
from partitioner.cost_graphs.read import read_graph
from passes.search.cost_graph.layouts import LayoutOp, LayoutProblem, OpKind, SplitBy, evaluate_layouts
from passes.search.cost_graph.layouts_ilp import place_layouts
from tests.support.matrix import some
from tests.support.sharded_evaluator import step_seconds

PROFILES = Path(__file__).parents[5] / "tests" / "data" / "pipedream"
KINDS: tuple[OpKind, ...] = ("neurons", "neurons", "channels", "channels", "samples", "input")


def drawn(seed: int, most: int = 9) -> LayoutProblem:
    """A random DAG; prices that make both layouts worth a thought."""
    dice = random.Random(seed)
    count = dice.randint(1, most)
    ops = tuple(
        LayoutOp(
            f"op{v}",
            dice.choice((0.0, dice.random())),
            dice.choice((0.0, dice.random())),
            dice.choice((0.0, dice.random())),
            dice.choice((0.0, dice.random(), 8 * dice.random(), 8 * dice.random())),
            dice.choice(KINDS if v else ("input", "neurons", "channels")),
            dice.random() < 0.8,
            dice.choice((None, None, 2, 5, 100)),
            dice.choice((None, None, 3, 50)),
        )
        for v in range(count)
    )
    likely = dice.choice((0.2, 0.5, 0.9))
    edges = tuple(pair for pair in itertools.combinations(range(count), 2) if dice.random() < likely)
    return LayoutProblem(ops, edges, dice.choice((1, 2, 3, 4, 16)), dice.choice((0.3, 1.0, 5.0)))


@pytest.mark.parametrize("block", range(4))
def test_the_cut_is_the_best_of_all_choices(block: int) -> None:
    mixed = 0
    for seed in range(100 * block, 100 * block + 100):
        problem = drawn(seed)
        found = place_layouts(problem, by_inputs=False)
        choices = itertools.product(("samples", "features"), repeat=len(problem.ops))
        best = min(step_seconds(problem, choice) for choice in choices)
        assert found.step_seconds == pytest.approx(best, rel=1e-9, abs=1e-12)
        assert found.step_seconds == pytest.approx(step_seconds(problem, found.layouts), rel=1e-9, abs=1e-12)
        assert (found.certificate.solver_status, found.certificate.bound_seconds) == (
            "optimal",
            found.step_seconds,
        )
        mixed += len({k for k, op in zip(found.layouts, problem.ops, strict=True) if op.kind != "input"}) == 2
    assert mixed > 10


@pytest.mark.parametrize("block", range(4))
def test_the_program_is_the_best_of_all_choices_with_inputs(block: int) -> None:
    better = 0
    for seed in range(50 * block, 50 * block + 50):
        problem = drawn(seed, most=6)
        found = place_layouts(problem)
        choices = itertools.product(("samples", "features", "inputs"), repeat=len(problem.ops))
        best = min(step_seconds(problem, choice) for choice in choices)
        assert found.step_seconds == pytest.approx(best, rel=1e-9, abs=1e-12)
        assert found.step_seconds == pytest.approx(step_seconds(problem, found.layouts), rel=1e-9, abs=1e-12)
        assert (found.certificate.solver_status, found.certificate.gap) == ("optimal", 0.0)
        better += found.step_seconds < place_layouts(problem, by_inputs=False).step_seconds * (1 - 1e-6)
    assert better > 5


def test_a_start_that_is_far_off_does_not_blur_the_program() -> None:
    """Sums that differ by 10¹² and more: what is scaled to the cut's value must not hide what is far below it."""
    for seed in range(1300, 1400):
        problem, dice = drawn(seed, most=5), random.Random(seed)
        ops = tuple(
            replace(
                op,
                activation_bytes=op.activation_bytes * 10 ** dice.randint(-8, 8),
                parameter_bytes=op.parameter_bytes * 10 ** dice.randint(-8, 8),
            )
            for op in problem.ops
        )
        problem = replace(problem, ops=ops)
        found = place_layouts(problem)
        choices = itertools.product(("samples", "features", "inputs"), repeat=len(ops))
        best = min(step_seconds(problem, choice) for choice in choices)
        assert best * (1 - 1e-12) <= found.step_seconds <= best * (1 + 1e-7)
        assert found.certificate.solver_status == "optimal"


def test_what_the_planner_says_is_what_the_evaluator_says_of_any_layouts() -> None:
    for seed in range(200):
        problem, dice = drawn(seed), random.Random(seed)
        wanted: tuple[SplitBy, ...] = ("samples", "features", "inputs")
        layouts = [dice.choice([k for k in wanted if problem.can_be(v, k)]) for v in range(len(problem.ops))]
        value = evaluate_layouts(problem, layouts).step_seconds
        assert value == pytest.approx(step_seconds(problem, layouts), rel=1e-12)


def test_layouts_of_three_kinds_have_no_order_that_a_cut_needs() -> None:
    """Three ops by neurons in a row: under no orders of their layouts are both edges' prices submodular."""
    ops = tuple(LayoutOp(f"op{v}", 0, 0, 1.0, 0, "neurons") for v in range(3))
    problem = LayoutProblem(ops, ((0, 1), (1, 2)), 4, 1.0)

    def price(chosen: dict[int, SplitBy]) -> float:
        return evaluate_layouts(problem, [chosen.get(v, "samples") for v in range(3)]).step_seconds

    def submodular(u: int, left: tuple[SplitBy, ...], right: tuple[SplitBy, ...]) -> bool:
        pairs = [
            (a, b, c, d)
            for a, b in itertools.combinations(left, 2)
            for c, d in itertools.combinations(right, 2)
        ]
        return all(
            price({u: a, u + 1: c}) + price({u: b, u + 1: d})
            <= price({u: a, u + 1: d}) + price({u: b, u + 1: c}) + 1e-9
            for a, b, c, d in pairs
        )

    kinds: tuple[SplitBy, ...] = ("samples", "features", "inputs")
    orders = list(itertools.permutations(kinds))
    first = {(i, j) for i, a in enumerate(orders) for j, b in enumerate(orders) if submodular(0, a, b)}
    second = {(j, k) for j, a in enumerate(orders) for k, b in enumerate(orders) if submodular(1, a, b)}
    assert first
    assert second
    assert not {j for _, j in first} & {j for j, _ in second}


@pytest.mark.parametrize("seed", some(range(40)))
def test_ties_are_by_samples(seed: int) -> None:
    """One device: nothing is sent and every layout costs the same."""
    problem = replace(drawn(seed), devices=1)
    assert set(place_layouts(problem).layouts) == {"samples"}


def test_prices_are_the_elements_that_a_device_needs_and_does_not_hold() -> None:
    """Counted over the elements of a step's activation [4·3 samples, 8 features] on 4 devices."""
    n, batch, width = 4, 3, 8
    everything = set(itertools.product(range(n * batch), range(width)))
    samples = {e for e in everything if e[0] // batch == 1}
    features = {e for e in everything if e[1] // (width // n) == 1}
    op = LayoutOp("u", 0, 0, batch * width, 0, "neurons", has_gradient=False)
    problem = LayoutProblem((op,), (), n, 1.0)
    assert problem.exchange_seconds(0) == len(features - samples) == len(samples - features)
    assert problem.gather_seconds(0) == len(everything - samples) == len(everything - features)
    learned = replace(problem, ops=(replace(op, has_gradient=True),))
    assert learned.gather_seconds(0) == 2 * problem.gather_seconds(0)


@pytest.mark.parametrize("devices", [2, 4, 16])
def test_prices_are_those_of_the_collectives(devices: int) -> None:
    op, link = LayoutOp("u", 1e-3, 2e-3, 6e6, 9e6, "neurons"), AlphaBeta(0.0, 1e9)
    problem = LayoutProblem((op, replace(op, id="v")), ((0, 1),), devices, 1e9)
    alike = evaluate_layouts(problem, ("samples", "samples"))
    assert alike.reduce_seconds == pytest.approx(2 * ring_all_reduce_seconds(9e6, devices, link), rel=1e-12)
    assert alike.gather_seconds == alike.exchange_seconds == 0
    gathered = evaluate_layouts(problem, ("samples", "features"))
    gather = ring_all_gather_seconds(devices * 6e6, devices, link)
    assert gathered.gather_seconds == pytest.approx(2 * gather, rel=1e-12)
    back = evaluate_layouts(problem, ("features", "samples"))
    assert back.exchange_seconds == pytest.approx(2 * all_to_all_seconds(6e6, devices, link), rel=1e-12)
    assert back.gather_seconds == 0
    summed = evaluate_layouts(problem, ("inputs", "samples"))
    assert summed.gather_seconds == pytest.approx(2 * gather, rel=1e-12)
    assert summed.exchange_seconds == 0
    assert evaluate_layouts(problem, ("features", "inputs")).exchange_seconds == 0
    assert gathered.parameter_bytes == back.parameter_bytes == 9e6 * (1 + 1 / devices)


def test_a_linear_layer_is_by_features_where_its_outputs_outnumber_the_samples_of_a_step() -> None:
    """n·B < o, Krizhevsky 2014; the way of outputs to the loss costs nothing here."""
    batch, width = 64, 512
    for devices in (2, 4, 8, 16):
        ops = (
            LayoutOp("before", 0, 0, 4 * batch * width, 0, "samples"),
            LayoutOp("linear", 0, 0, 0, 4 * width * 511, "neurons"),
        )
        found = place_layouts(LayoutProblem(ops, ((0, 1),), devices, 1e9), by_inputs=False)
        assert found.layouts[1] == ("features" if devices * batch < 511 else "samples"), devices


def profile_of(name: str) -> PipeDreamProfile:
    profile = read_graph(PROFILES / name / "graph.txt", devices=1).profile
    assert profile is not None
    return profile


@pytest.mark.parametrize("name", ["alexnet", "vgg16"])
def test_the_known_choice(name: str) -> None:
    """Convolutions by samples, fully connected layers split: "one weird trick"."""
    profile = profile_of(name)
    problem = layout_problem(profile, 4, 1e9)
    found, wider = place_layouts(problem, by_inputs=False), place_layouts(problem)
    for layer, layout, with_inputs in zip(profile.layers, found.layouts, wider.layouts, strict=True):
        if layer.what.startswith("Conv2d"):
            assert layout == with_inputs == "samples", layer
        if layer.what.startswith("Linear"):
            assert layout == "features", layer
            assert with_inputs in ("features", "inputs"), layer
    assert wider.step_seconds < found.step_seconds


def test_time_that_ends_at_once_leaves_the_cut_and_its_honest_gap() -> None:
    problem = layout_problem(profile_of("squeezenet1_0"), 4, 1e9)
    found = place_layouts(problem, 1e-6)
    best = place_layouts(problem)
    assert found.certificate.bound_seconds <= best.step_seconds <= found.step_seconds
    assert found.certificate.solver_status == "optimal" or found.certificate.gap > 0


@pytest.mark.parametrize("name", ["vgg16", "resnet18", "alexnet", "squeezenet1_0"])
@pytest.mark.parametrize("devices", [1, 4, 16])
def test_profiles_are_never_slower_than_data_parallelism(name: str, devices: int) -> None:
    profile = profile_of(name)
    problem = layout_problem(profile, devices, 1e9)
    layers = [layer for layer in profile.layers if layer.what != "Input"]
    compute = sum(layer.forward_ms + layer.backward_ms for layer in layers) / 1e3
    reduced = 2 * (devices - 1) / devices * sum(layer.parameter_bytes for layer in layers) / 1e9
    parallel = evaluate_layouts(problem, ["samples"] * len(problem.ops)).step_seconds
    assert parallel == pytest.approx(compute + reduced, rel=1e-9)
    assert place_layouts(problem).step_seconds <= parallel * (1 + 1e-12)


def test_prices_of_any_size_are_cut_exactly() -> None:
    """A price that nobody pays, 10²⁰ times the rest, hides nothing: prices are whole numbers without rounding."""
    huge = LayoutOp("huge", 1e-9, 0, 1e-3, 1e20, "neurons", has_gradient=False)
    small = LayoutOp("small", 1e-9, 0, 1e-3, 1e-2, "neurons")
    problem = LayoutProblem((huge, small), ((0, 1),), 2, 1e9)
    found = place_layouts(problem)
    assert found.layouts == ("features", "features")
    assert found.step_seconds == pytest.approx(2e-9 + 1.5e-12, rel=1e-9)
    with pytest.raises(GraphError, match="longer than numbers can say"):
        place_layouts(replace(problem, bytes_per_second=1e-300))


def test_names_say_how_a_layer_splits() -> None:
    assert kind_of("Conv2d(64, 192, kernel_size=(5, 5), stride=(1, 1))") == ("neurons", 64, 192)
    assert kind_of("Linear(in_features=4096, out_features=1000, bias=True)") == ("neurons", 4096, 1000)
    assert kind_of("BatchNorm2d(64, eps=1e-05, momentum=0.1)") == ("channels", None, 64)
    assert kind_of("MaxPool2d(kernel_size=3, stride=2)") == kind_of("View(9216)") == ("channels", None, None)
    assert kind_of("Input") == ("input", None, None)
    for unknown in ("LSTM(1024, 1024)", "Softmax(dim=1)", "LinearlyOdd(3, 4)", "Adder", "Conv2d"):
        assert kind_of(unknown) == ("samples", None, None)


def test_every_layer_of_the_profiles_has_a_kind_and_more_devices_than_channels_cannot_split_it() -> None:
    for name in ("vgg16", "resnet18", "alexnet", "squeezenet1_0"):
        assert "samples" not in {kind_of(layer.what)[0] for layer in profile_of(name).layers}
    profile = profile_of("alexnet")
    problem = layout_problem(profile, 1001, 1e9)
    last = [layer.what[:6] == "Linear" and layer.parameter_bytes < 2e7 for layer in profile.layers].index(
        True
    )
    assert problem.can_be(last, "inputs")
    assert not problem.can_be(last, "features")
    assert place_layouts(problem).layouts[last] != "features"
    with pytest.raises(InternalError, match="cannot be split by features"):
        evaluate_layouts(problem, ["features"] * len(problem.ops))
