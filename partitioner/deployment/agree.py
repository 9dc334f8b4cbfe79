"""Agreement of all ranks on who plays which device of the plan, or their refusal, with every difference at once.

every rank: its facts ─► rank 0: ranks_or_differences(plan, facts) ─► every rank: RankMap, or the same PlanError
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn

from cost_models.errors import PlanError
from cost_models.spec.presets import DEVICES, is_called
from cost_models.units import counted, format_bytes, listed
from partitioner.deployment.facts import UNRUN_SUGGESTIONS, RankFacts, choose_device, own_facts, ranks_by_host
from partitioner.record.data import PlanData
from partitioner.record.rebuild import ranks_in_order
from partitioner.report.launch import launch_of
from runtime.program.relabel import RankMap
from runtime.ranks.meeting import Meeting


def agree_on_ranks(
    meeting: Meeting,
    plan: PlanData,
    model: nn.Module,
    device: str | torch.device | None,
    *,
    check_memory: bool,
    check_hosts: bool,
) -> tuple[torch.device, RankMap]:
    """Return this rank's device, and who plays which device of the plan. Collective; the same PlanError on every rank."""
    own_device, problem = choose_device(plan, device)
    mine = own_facts(plan, model, own_device, problem, chosen=device is not None)

    def judge(said: list[Any]) -> dict[str, Any]:
        facts = TypeAdapter(list[RankFacts]).validate_python(said)
        ranks, problems, suggestions = ranks_or_differences(
            plan, facts, check_hosts=check_hosts, check_memory=check_memory
        )
        devices = None if ranks is None else ranks.device_of_rank
        return {"devices": devices, "problems": problems, "suggestions": suggestions}

    verdict = meeting.decide("launch", asdict(mine), judge)
    if verdict["devices"] is None or own_device is None:
        raise refusal(plan, verdict["problems"], verdict["suggestions"])
    return own_device, RankMap(tuple(verdict["devices"]))


def ranks_or_differences(
    plan: PlanData, facts: Sequence[RankFacts], *, check_hosts: bool, check_memory: bool
) -> tuple[RankMap | None, list[str], list[str]]:
    """Return (the map, differences, what to try). ``facts``: one per rank."""
    problems: list[str] = []
    suggestions: list[str] = []
    ranks: RankMap | None = None
    if len(facts) != plan.world_size:
        problems.append(f"it is made for {counted(plan.world_size, 'rank')}, {len(facts)} are running")
        commands = [line for line in launch_of(plan, "YOUR_SCRIPT").splitlines() if "torchrun" in line]
        more = f" and so on, on {len(commands)} nodes" if len(commands) > 1 else ""
        suggestions.append(f"start {counted(plan.world_size, 'process')}: {commands[0]}{more}")
        idle = len(plan.cluster.devices) - plan.world_size
        if 0 < len(facts) - plan.world_size <= idle:
            problems.append(
                f"the search left {idle} of {counted(len(plan.cluster.devices), 'device')} idle: no faster plan was found"
            )
            suggestions.append(
                f'to use more devices: plan with strategy="auto", min_stages={len(facts)}, or a larger batch_size or model'
            )
    elif check_hosts:
        ranks, hosts = ranks_by_host(plan, [fact.place for fact in facts])
        if hosts:
            suggestions.append(
                "deploy(..., check_hosts=False) lets rank r play the r-th device, wherever it runs"
            )
        problems += hosts
    else:
        ranks = ranks_in_order(plan)
    others = _unlike_first(facts)
    problems += others
    if any("plan" in other for other in others):
        suggestions.append("plan once, save the plan, and load it on every rank")
    problems += [f"rank {r} has no device: {f.problem}" for r, f in enumerate(facts) if f.problem is not None]
    if any(fact.device is None for fact in facts) and plan.unrun_kinds:
        suggestions += UNRUN_SUGGESTIONS
    if ranks is not None:
        problems += _devices(plan, facts, ranks)
        short = list(_memory(plan, facts, ranks)) if check_memory else []
        if short:
            suggestions.append("free the memory, or deploy(..., check_memory=False) to try all the same")
        problems += short
    return (None if problems else ranks), problems, suggestions


def refusal(plan: PlanData, problems: Sequence[str], suggestions: Sequence[str]) -> PlanError:
    """Make the error that every rank raises."""
    return PlanError(
        f"the plan for {plan.model.name} does not fit this launch", because=problems, suggestions=suggestions
    )


def _unlike_first(facts: Sequence[RankFacts]) -> list[str]:
    """Name the ranks whose plan or versions are not those of rank 0."""
    first = facts[0]
    found = []
    for rank, fact in enumerate(facts):
        if fact.plan != first.plan:
            found.append(f"the plan of rank {rank} is not that of rank 0")
        found += [
            f"rank {rank} has {name} {fact.versions.get(name)}, rank 0 has {version}"
            for name, version in first.versions.items()
            if fact.versions.get(name) != version
        ]
    return found


def _devices(plan: PlanData, facts: Sequence[RankFacts], ranks: RankMap) -> Iterator[str]:
    """Compare kind, model, data types and backend of each rank's device with the plan's."""
    for rank, (fact, index) in enumerate(zip(facts, ranks.device_of_rank, strict=True)):
        planned, found = plan.cluster.devices[index], fact.device
        if found is None:
            continue
        where = f"rank {rank} on {fact.place.names[0]}"
        if planned.kind == "cuda" and found.kind != "cuda" and not fact.chosen:
            yield f"{where} has no GPU, the plan has a {planned.model} there"
        elif (
            planned.kind == found.kind == "cuda"
            and not fact.chosen
            and planned.model in DEVICES
            and not is_called(planned.model, found.name)
        ):
            yield f"{where} has a {found.name}, the plan has a {planned.model} there"
        yield from (f"{where}: {found.name} does not compute in {dtype}" for dtype in found.missing_dtypes)
        if fact.backend == "nccl" and found.kind == "cpu":
            yield f"{where} is in a process group of NCCL, which has no CPU tensors: use Gloo"


def _memory(plan: PlanData, facts: Sequence[RankFacts], ranks: RankMap) -> Iterator[str]:
    """Name memories with less free than the predicted peaks of the ranks that share them; their contexts are there."""
    sharing: dict[str, list[int]] = defaultdict(list)
    for rank, fact in enumerate(facts):
        if fact.device is not None and fact.device.free_bytes is not None:
            sharing[fact.device.memory].append(rank)
    prediction = plan.prediction

    def more(device: int) -> int:
        return prediction.peak_memory_bytes[str(device)] - prediction.memory_parts(device).get("context", 0)

    for members in sharing.values():
        needed = sum(more(ranks.device_of_rank[rank]) for rank in members)
        free = min(found.free_bytes or 0 for rank in members if (found := facts[rank].device) is not None)
        if needed > free:
            found = facts[members[0]].device
            assert found is not None
            who = (
                f"rank {members[0]} needs"
                if len(members) == 1
                else f"ranks {listed(members, 8)} together need"
            )
            yield (
                f"{who} {format_bytes(needed)} on {found.name} of {facts[members[0]].place.names[0]}, "
                f"{format_bytes(free)} are free"
            )
