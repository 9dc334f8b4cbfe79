"""All ranks agree on who plays which device, or all refuse for the same reasons."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from partitioner.deployment.compare import ranks_or_differences, refusal
from partitioner.deployment.facts import RankFacts, choose_device, own_facts
from partitioner.record.data import PlanData
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
    """This rank's device, and who plays which device of the plan. Collective; the same PlanError on every rank."""
    own_device, problem = choose_device(plan, device)
    mine = own_facts(plan, model, own_device, problem, chosen=device is not None)

    def judge(said: list[Any]) -> dict[str, Any]:
        facts = [RankFacts.from_dict(one) for one in said]
        ranks, problems, suggestions = ranks_or_differences(
            plan, facts, check_hosts=check_hosts, check_memory=check_memory
        )
        devices = None if ranks is None else ranks.device_of_rank
        return {"devices": devices, "problems": problems, "suggestions": suggestions}

    verdict = meeting.decide("launch", mine.to_dict(), judge)
    if verdict["devices"] is None or own_device is None:
        raise refusal(plan, verdict["problems"], verdict["suggestions"])
    return own_device, RankMap(tuple(verdict["devices"]))
