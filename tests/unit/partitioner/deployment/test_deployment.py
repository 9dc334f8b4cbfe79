"""Who plays which device, and what keeps a launch from fitting a plan: pure functions of what ranks say."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import nn

from cost_models.cluster import ClusterSpec
from cost_models.errors import ClusterError, InfeasibleError, PlanError, RankFailureError, UsageError
from partitioner import Plan
from partitioner.deploy_together import error_as_data, error_from_data, sorted_options
from partitioner.deployment.agree import ranks_or_differences, refusal
from partitioner.deployment.facts import (
    DeviceFacts,
    HostPlace,
    RankFacts,
    choose_device,
    device_facts,
    free_memory_bytes,
    own_facts,
    plan_digest,
    ranks_by_host,
    same_host,
)
from runtime.ranks.launch import WorkerError
from tests.support.made_plans import GIB, MIB, made_plan

NODE = {"device": "A100-40GB", "links": "NVLink3"}
HOSTS = ClusterSpec.from_dict(
    {
        "nodes": [
            {"name": "a", "host": "gpu-a", "count": 3, **NODE},
            {"name": "b", "host": "10.0.0.2", "count": 2, **NODE},
        ],
        "network": {"bandwidth": "100Gbps", "latency": "5us"},
    }
)
PLAN = made_plan(HOSTS, (0, 1, 3, 4))
"""Device 2, the last of host gpu-a, is idle."""


def place(*names: str, local: int = 0) -> HostPlace:
    return HostPlace(names, local)


def facts(*places: HostPlace, plan: Plan = PLAN, **changes: Any) -> list[RankFacts]:
    gpu = DeviceFacts("cuda", "NVIDIA A100-SXM4-40GB", "", 39 * GIB, ())
    return [
        RankFacts(
            place,
            plan_digest(plan),
            {"torch": "2.13.0", "partitioner": "0.1.0"},
            replace(gpu, memory=f"GPU-{rank}"),
            None,
            **changes,
        )
        for rank, place in enumerate(places)
    ]


B0, B1 = place("b.site", "10.0.0.2"), place("b.site", "10.0.0.2", local=1)
A0, A1 = place("gpu-a.site"), place("gpu-a.site", local=1)


def differences(said: list[RankFacts], plan: Plan = PLAN, **options: bool) -> list[str]:
    ranks, problems, _ = ranks_or_differences(
        plan, said, **{"check_hosts": True, "check_memory": True, **options}
    )
    assert (ranks is None) == bool(problems)
    return problems


def test_processes_play_the_devices_of_their_host_in_the_order_of_their_local_ranks() -> None:
    for places, devices in (
        ([A0, A1, B0, B1], (0, 1, 3, 4)),
        ([B0, B1, A0, A1], (3, 4, 0, 1)),
        ([B1, A1, A0, B0], (4, 1, 0, 3)),
    ):
        ranks, problems = ranks_by_host(PLAN, places)
        assert not problems
        assert ranks is not None
        assert ranks.device_of_rank == devices


def test_hosts_that_differ_are_all_named() -> None:
    assert ranks_by_host(PLAN, [A0, A1, place("gpu-a.site", local=2), place("laptop")]) == (
        None,
        [
            "host gpu-a: the plan has 2 ranks there, 3 are running (global rank 0, 1, 2)",
            "host 10.0.0.2: the plan has 2 ranks there, none is running",
            "no host of the plan: 1 is running (global rank 3) on laptop",
        ],
    )
    _, problems = ranks_by_host(PLAN, [place("gpu-a.x"), place("gpu-a.y"), B0, B1])
    assert problems == [
        "host gpu-a: the plan has 2 ranks there, and gpu-a.x and gpu-a.y both go by that name"
    ]


def test_nodes_without_a_host_may_be_anywhere() -> None:
    nodes = [
        {"name": "a", "host": "gpu-a", "count": 1, **NODE},
        {"name": "b", "count": 2, **NODE},
        {"name": "c", "host": "localhost", "count": 1, **NODE},
    ]
    network = {"bandwidth": "100Gbps", "latency": "5us"}
    plan = made_plan(ClusterSpec.from_dict({"nodes": nodes, "network": network}), (0, 1, 2, 3))
    ranks, problems = ranks_by_host(plan, [place("x"), place("y"), place("gpu-a"), place("z")])
    assert not problems
    assert ranks is not None
    assert ranks.device_of_rank == (1, 2, 0, 3)
    _, problems = ranks_by_host(plan, [place("gpu-a")])
    assert problems == ["nodes without a host: the plan has 3 ranks there, none is running"]


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        ("gpu-a", "GPU-A.site.", True),
        ("gpu-a.x", "gpu-a.y", False),
        ("gpu-a", "gpu-ab", False),
        ("10.0.0.1", "10", False),
        ("10.0.0.1", "10.0.0.1", True),
    ],
)
def test_names_of_one_machine(a: str, b: str, same: bool) -> None:
    assert same_host(a, b) == same_host(b, a) == same


def test_a_launch_that_fits() -> None:
    ranks, problems, _ = ranks_or_differences(
        PLAN, facts(B0, B1, A0, A1), check_hosts=True, check_memory=True
    )
    assert problems == []
    assert ranks is not None
    assert ranks.device_of_rank == (3, 4, 0, 1)
    anywhere = facts(*[place("laptop", local=n) for n in range(4)])
    assert differences(anywhere)
    assert differences(anywhere, check_hosts=False) == []


def test_every_difference_is_told_at_once() -> None:
    said = facts(A0, A1, B0, B1)
    gpu = said[0].device
    assert gpu is not None
    said[1] = replace(said[1], versions={"torch": "2.12.1", "partitioner": "0.1.0"})
    said[2] = replace(said[2], plan="another", device=replace(gpu, name="Tesla V100-SXM2-32GB", memory="v"))
    said[3] = replace(
        said[3], device=replace(gpu, memory="x", free_bytes=2 * GIB, missing_dtypes=("bfloat16",))
    )
    assert differences(said) == [
        "rank 1 has torch 2.12.1, rank 0 has 2.13.0",
        "the plan of rank 2 is not that of rank 0",
        "rank 2 on b.site has a Tesla V100-SXM2-32GB, the plan has a A100-40GB there",
        "rank 3 on b.site: NVIDIA A100-SXM4-40GB does not compute in bfloat16",
        "rank 3 needs 3.00 GiB on NVIDIA A100-SXM4-40GB of b.site, 2.00 GiB are free",
    ]
    assert not any("free" in line for line in differences(said, check_memory=False))
    error = refusal(PLAN, differences(said), [])
    assert isinstance(error, PlanError)
    assert len(error.because) == 5


def test_ranks_that_share_a_memory_need_it_together() -> None:
    cpu = DeviceFacts("cpu", "CPU", "machine", 7 * GIB, ())
    plan = made_plan(ClusterSpec.local(3, memory="8GiB"), (0, 1, 2))
    said = [replace(fact, device=cpu) for fact in facts(place("m"), place("m"), place("m"), plan=plan)]
    (problem,) = differences(said, plan)
    assert problem == "ranks 0, 1, 2 together need 9.00 GiB on CPU of m, 7.00 GiB are free"
    enough = [replace(fact, device=replace(cpu, free_bytes=10 * GIB)) for fact in said]
    assert differences(enough, plan) == []
    unknown = [replace(fact, device=replace(cpu, free_bytes=None)) for fact in said]
    assert differences(unknown, plan) == []


def test_another_number_of_ranks_and_ranks_without_devices() -> None:
    said = facts(A0, A1, B0)
    said[2] = replace(said[2], device=None, problem="it sees no GPU")
    assert differences(said) == [
        "it is made for 4 ranks, 3 are running",
        "rank 2 has no device: it sees no GPU",
    ]
    on_cpu = [replace(f, device=DeviceFacts("cpu", "CPU", "m", None, ())) for f in facts(A0, A1, B0, B1)]
    assert differences(on_cpu)[0] == "rank 0 on gpu-a.site has no GPU, the plan has a A100-40GB there"
    assert differences([replace(fact, chosen=True) for fact in on_cpu]) == [], "device='cpu' was asked for"
    nccl = [replace(fact, chosen=True, backend="nccl") for fact in on_cpu]
    assert "use Gloo" in differences(nccl)[0]


def test_plans_for_devices_of_kinds_that_were_never_run_are_refused() -> None:
    plan = made_plan(ClusterSpec.parse("MI300X:2"), (0, 1))
    assert plan.unrun_kinds == ("rocm",)
    device, problem = choose_device(plan, None)
    assert device is None
    assert problem == (
        "the plan has rocm devices (MI300X), which can be planned for only: plans run on cpu, cuda devices"
    )
    said = [replace(fact, device=None, problem=problem) for fact in facts(place("m"), place("m"), plan=plan)]
    _, problems, suggestions = ranks_or_differences(plan, said, check_hosts=True, check_memory=True)
    assert problems == [f"rank {rank} has no device: {problem}" for rank in (0, 1)]
    assert "run --local" in suggestions[0]
    assert choose_device(plan, "cpu") == (torch.device("cpu"), None), "asked for"


def test_more_ranks_than_the_search_uses_are_told_why() -> None:
    plan = made_plan(ClusterSpec.local(3, memory="8GiB"), (0, 1))
    _, problems, suggestions = ranks_or_differences(
        plan, facts(place("m"), place("m"), place("m"), plan=plan), check_hosts=True, check_memory=False
    )
    assert problems[1] == "the search left 1 of 3 devices idle: no faster plan was found"
    assert suggestions[0].endswith("torchrun --standalone --nproc-per-node 2 YOUR_SCRIPT")
    assert "min_stages=3" in suggestions[1]
    beyond = facts(*(place("m"),) * 4, plan=plan)
    _, problems, _ = ranks_or_differences(plan, beyond, check_hosts=True, check_memory=False)
    assert len(problems) == 1, "the cluster has no fourth device"


def test_facts_travel_as_plain_data() -> None:
    (fact, *_) = facts(A0, problem="why")
    adapter = TypeAdapter(RankFacts)
    assert adapter.validate_python(json.loads(json.dumps(asdict(fact)))) == fact
    own = own_facts(PLAN, nn.Linear(2, 2), torch.device("cpu"), None, chosen=False)
    assert adapter.validate_python(json.loads(json.dumps(asdict(own)))) == own
    assert own.device is not None
    assert own.device.free_bytes is None or MIB < own.device.free_bytes < 2**50


def test_plans_are_alike_where_what_runs_is_alike() -> None:
    slower = replace(PLAN.certificate, search_seconds=9.0)
    assert plan_digest(PLAN.model_copy(update={"certificate": slower})) == plan_digest(PLAN)
    assert plan_digest(PLAN.model_copy(update={"schedule": "gpipe"})) != plan_digest(PLAN)
    assert plan_digest(Plan.from_json(PLAN.model_dump_json())) == plan_digest(PLAN)


def test_the_device_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_device(PLAN, "cpu") == (torch.device("cpu"), None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device, problem = choose_device(PLAN, None)
    assert device is None
    assert problem is not None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "2")
    for count, expected in ((4, "cuda:2"), (1, "cuda:0")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert choose_device(PLAN, None) == (torch.device(expected), None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device(PLAN, "cuda") == (
        None,
        "it is process 2 of its machine, which shows it 2 GPUs",
    )


def test_what_a_gpu_does_not_compute_in(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="Tesla V100", major=7, minor=0, uuid="u")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 20))
    types = (torch.float32, torch.bfloat16, torch.float8_e4m3fn)
    found = device_facts(torch.device("cuda", 0), A0, types)
    assert found == DeviceFacts("cuda", "Tesla V100", "u", 12, ("bfloat16", "float8_e4m3fn"))
    gpu.major = 9
    assert device_facts(torch.device("cuda", 0), A0, types).missing_dtypes == ()


def test_free_memory_of_a_machine(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:       1 kB\n")
    assert free_memory_bytes(meminfo) in (0, 1024)
    assert free_memory_bytes(tmp_path / "none") is None


@pytest.mark.parametrize("kind", [InfeasibleError, ClusterError, UsageError])
def test_errors_keep_their_kind_and_text_on_the_way_to_other_ranks(kind: type[UsageError]) -> None:
    error = kind("what", ["why"], ["how"])
    back = error_from_data(error_as_data(error))
    assert type(back) is kind
    assert str(back) == str(error)


def test_errors_of_other_kinds() -> None:
    assert type(error_from_data(error_as_data(WorkerError("a worker died")))) is RankFailureError
    back = error_from_data(error_as_data(ValueError("no")))
    assert isinstance(back, RankFailureError)
    assert back.because == ("ValueError: no",)


def test_options_go_where_they_belong() -> None:
    tracing, planning, deploying = sorted_options(
        {"batch_size": 4, "seed": 1, "dynamic_dims": {}, "compile": True, "max_stages": 2, "name": "n"}
    )
    assert tracing == {"dynamic_dims": {}, "name": "n"}
    assert planning == {"batch_size": 4, "dynamic_dims": {}, "max_stages": 2, "name": "n"}
    assert deploying == {"seed": 1, "dynamic_dims": {}, "compile": True}
    with pytest.raises(UsageError, match="did you mean 'batch_size'"):
        sorted_options({"batchsize": 4})
