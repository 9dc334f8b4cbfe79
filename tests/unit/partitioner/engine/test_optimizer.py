"""One optimizer over parameters of which most are elsewhere. No processes: each rank's optimizer is made here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Adafactor, get_cosine_schedule_with_warmup

from cost_models.cluster import ClusterSpec
from cost_models.errors import PlanError, UsageError
from partitioner.engine.optimizer import make_engine_optimizer, refuse_optimizer_options
from partitioner.engine.optimizer_trials import state_ratios
from partitioner.plan import Plan
from passes.graph.graph import OpGraph
from passes.trace.trace import trace
from runtime.state.rank_state import RankState
from tests.support.made_plans import made_plan

CPU = torch.device("cpu")
HOLDERS = {
    "0.weight": (0,),
    "0.bias": (0,),
    "1.weight": (1,),
    "1.bias": (1,),
    "2.weight": (0, 2),
    "2.bias": (2,),
}


@pytest.fixture(scope="module")
def graph() -> OpGraph:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].bias.requires_grad_(False)
    return trace(model, torch.ones(2, 4), loss_fn=lambda output, _: output.mean())


@pytest.fixture(scope="module")
def plan() -> Plan:
    return made_plan(ClusterSpec.local(2))


def state_of(rank: int, graph: OpGraph) -> RankState:
    own = {
        name: nn.Parameter(torch.ones(spec.shape), spec.requires_grad)
        for name, spec in graph.parameters.items()
        if rank in HOLDERS[name]
    }
    return RankState(rank, own, own, {}, HOLDERS)


def make(rank: int, graph: OpGraph, plan: Plan, make: Any, **options: Any) -> torch.optim.Optimizer:
    return make_engine_optimizer(make, options, plan, graph, state_of(rank, graph), 0.1, CPU)


def by_name(named: list[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
    weights = [p for name, p in named if name.endswith("weight")]
    biases = [p for name, p in named if name.endswith("bias")]
    return torch.optim.AdamW([{"params": weights, "weight_decay": 0.1}, {"params": biases}], lr=1.0)


def sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


def test_every_rank_has_the_same_groups_with_its_own_parameters(graph: OpGraph, plan: Plan) -> None:
    seen: list[list[str]] = []

    def spying(named: list[tuple[str, nn.Parameter]]) -> torch.optim.AdamW:
        seen.append([name for name, _ in named])
        assert [p.is_meta for _, p in named] == [0 not in HOLDERS[name] for name, _ in named]
        return by_name(named)

    assert sizes(make(0, graph, plan, spying)) == [2, 1]
    assert seen == [["0.weight", "0.bias", "1.weight", "2.weight", "2.bias"]], "the frozen one is not trained"
    assert sizes(make(1, graph, plan, by_name)) == [1, 0]
    assert sizes(make(2, graph, plan, by_name)) == [1, 1]
    assert sizes(make(7, graph, plan, None)) == [0]
    named = make(1, graph, plan, lambda pairs: torch.optim.SGD(pairs, lr=0.1))
    assert named.param_groups[0]["param_names"] == ["1.weight"]


@pytest.mark.parametrize("rank", [0, 1, 7])
def test_schedulers_run_alike_on_all_ranks(rank: int, graph: OpGraph, plan: Plan) -> None:
    for schedule in (
        lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 2, 9),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 2.0, total_steps=9),
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1),
    ):
        mine = make(rank, graph, plan, by_name)
        theirs = by_name([(name, nn.Parameter(torch.ones(1))) for name in ("a.weight", "a.bias")])
        schedules = [schedule(mine), schedule(theirs)]
        for _ in range(5):
            for optimizer, scheduler in zip((mine, theirs), schedules, strict=True):
                optimizer.step()
                plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
                scheduler.step(*[1.0] if plateau else [])
            assert [g["lr"] for g in mine.param_groups] == [g["lr"] for g in theirs.param_groups]


ALL = [
    torch.optim.Adadelta,
    torch.optim.Adafactor,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
    Adafactor,
]


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_optimizers_step_with_and_without_parameters(cls: Any, graph: OpGraph, plan: Plan) -> None:
    for rank in (0, 7):
        optimizer = make(rank, graph, plan, cls)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        assert all(not leaf.is_meta for state in optimizer.state.values() for leaf in tensors(state))
        assert len(optimizer.state) <= sum(sizes(optimizer))
        optimizer.load_state_dict(optimizer.state_dict())


def tensors(state: Any) -> list[Tensor]:
    return [value for value in state.values() if isinstance(value, Tensor)]


def parameter(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(3, 3, dtype=dtype))


@pytest.mark.parametrize(
    ("optimizer", "ratio"),
    [
        (torch.optim.SGD([parameter()]), 0),
        (torch.optim.SGD([parameter()], momentum=0.9), 1),
        (torch.optim.AdamW([parameter()]), 2),
        (torch.optim.AdamW([parameter(torch.bfloat16)]), 2),
        (torch.optim.Adam([parameter()], amsgrad=True), 3),
        (torch.optim.Adam([parameter()], fused=True), 2),
        (torch.optim.RMSprop([parameter()], momentum=0.9, centered=True), 3),
        (torch.optim.Adafactor([parameter()]), 2 / 16),
    ],
)
def test_state_per_byte_of_a_parameter(optimizer: torch.optim.Optimizer, ratio: float) -> None:
    assert state_ratios(optimizer, CPU) == [pytest.approx(ratio)]


def test_options_of_groups_count_and_schedulers_marks_do_not() -> None:
    optimizer = torch.optim.SGD(
        [{"params": [parameter()]}, {"params": [parameter()], "momentum": 0.5}], lr=0.1
    )
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert state_ratios(optimizer, CPU) == [0, 1]


def test_an_optimizer_that_cannot_be_tried_out_is_taken_with_a_warning(
    graph: OpGraph, plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    assert sizes(make(0, graph, plan, torch.optim.SparseAdam)) == [3]
    assert "the state of SparseAdam cannot be measured" in caplog.text


def test_heavier_ones_are_refused_alike_on_every_rank(graph: OpGraph) -> None:
    sgd = made_plan(ClusterSpec.local(2), optimizer_memory="momentum")
    said = set()
    for rank in (0, 1, 2, 7):
        with pytest.raises(PlanError) as caught:
            make(rank, graph, sgd, torch.optim.AdamW)
        said.add(str(caught.value))
    (text,) = said
    assert "rank 0: 288 B" in text
    assert "(288 bytes) of state, 144 B planned" in text
    assert "plan again with optimizer_memory='adam'" in text

    def heavy_where_little_is(named: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        groups = [{"params": [p], "momentum": 0.9 if name == "2.bias" else 0.0} for name, p in named]
        return torch.optim.SGD(groups, lr=0.1)

    assert sizes(make(2, graph, sgd, heavy_where_little_is)) == [0, 0, 0, 1, 1]


def test_what_cannot_train_in_parts_is_refused(graph: OpGraph, plan: Plan) -> None:
    with pytest.raises(UsageError, match="LBFGS calls the model itself"):
        make(0, graph, plan, torch.optim.LBFGS)
    with pytest.raises(UsageError, match="1 of its parameters are not among those it was given"):
        make(0, graph, plan, lambda named: torch.optim.SGD([parameter()]))
    with pytest.raises(UsageError, match=r"it returned list, not a torch\.optim\.Optimizer"):
        make(0, graph, plan, list)

    class Prodigy(torch.optim.SGD):
        pass

    class Mine(Prodigy):
        pass

    with pytest.raises(UsageError, match="Prodigy estimates its step size from all parameters together"):
        make(0, graph, plan, Mine)
    alone = dict.fromkeys(HOLDERS, (0,))
    own = {name: nn.Parameter(torch.ones(spec.shape)) for name, spec in graph.parameters.items()}
    state = RankState(0, own, own, {}, alone)
    assert make_engine_optimizer(Mine, {"lr": 1.0}, plan, graph, state, 0.1, CPU), "one rank has all of them"


@pytest.mark.parametrize(
    ("make", "options", "learning_rate", "text"),
    [
        ("adamw", {}, None, "the text 'adamw'"),
        (torch.optim.SGD([torch.zeros(1)], lr=1.0), {}, None, "SGD, already made"),
        (None, {"lr": 1.0}, None, "optimizer_kwargs= has lr"),
        (torch.optim.AdamW, {}, 0.1, "nothing reads it"),
    ],
)
def test_options_that_nothing_would_read_are_refused(
    make: Any, options: dict[str, float], learning_rate: float | None, text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        refuse_optimizer_options(make, options, learning_rate)


def test_options_that_are_read_are_taken() -> None:
    refuse_optimizer_options(None, {}, 0.1)
    refuse_optimizer_options(torch.optim.AdamW, {"lr": 0.1}, None)
    refuse_optimizer_options(lambda pairs: None, {}, None)
