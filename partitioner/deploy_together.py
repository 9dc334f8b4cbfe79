"""``deploy(model, cluster, …)`` under torchrun, without a plan: rank 0 plans, every rank gets its plan and deploys it."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from cost_models import errors
from cost_models.cluster import ClusterSpec
from cost_models.errors import PartitionerError, RankFailureError, UsageError
from partitioner.api import partition
from partitioner.deployment.deploy import deploy_plan, deployed_workload
from partitioner.engine.engine import Engine
from partitioner.models.as_graph import ModelOrTrace, as_graph
from partitioner.plan import Plan
from partitioner.unforeseen import versions_named
from runtime.ranks.meeting import Meeting


@versions_named()
def deploy(
    model: ModelOrTrace,
    cluster: ClusterSpec,
    *,
    example_inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    **options: Any,
) -> Engine:
    """Plan how ``model`` trains on ``cluster``, and deploy it: ``partition(…)`` and ``plan.deploy(…)`` in one.

    Collective: every rank that torchrun started calls it, with the same arguments. Only rank 0 plans, so that all ranks
    have one plan, whatever time limits and calibrations do to it; what it cannot plan is refused on every rank with the
    same words. ``options``: those of :func:`partition` and of ``Plan.deploy``. The plan is ``engine.plan``.
    """
    tracing, planning, deploying = sorted_options(options)
    workload = deployed_workload(model, example_inputs, loss_fn)
    meeting = Meeting.join()
    with meeting.all_or_none("trace"):
        checked = {} if meeting.rank == 0 else {"check": "off"}  # one rank's comparison is enough
        graph = as_graph(workload, **{**tracing, **checked})
    # The search keeps its own limit; describing and proving the plan come on top.
    limit = (planning.get("time_limit_seconds") or 0.0) + meeting.timeout_seconds
    plan = plan_together(meeting, lambda: partition(graph, cluster, **planning), limit)
    return deploy_plan(plan, workload, graph=graph, **deploying)


def plan_together(meeting: Meeting, make: Callable[[], Plan], timeout_seconds: float) -> Plan:
    """Return rank 0's plan on every rank, or raise its error there. Collective."""
    failure: Exception | None = None

    def told() -> dict[str, Any]:
        nonlocal failure
        try:
            return {"plan": make().model_dump_json()}
        except Exception as error:  # noqa: BLE001 - the others wait, and must hear of it whatever it is
            failure = error
            return {"error": error_as_data(error)}

    answer = meeting.tell("plan", told, timeout_seconds)
    if failure is not None:
        raise failure
    if "error" in answer:
        raise error_from_data(answer["error"])
    return Plan.from_json(answer["plan"], source="the plan of rank 0")


def sorted_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Sort ``options`` into those of ``as_graph``, ``partition`` and ``deploy_plan``; some belong to several."""
    kinds = [_keywords(function) for function in (as_graph, partition, deploy_plan)]
    known = sorted(set().union(*kinds))
    unknown = [name for name in options if name not in known]
    if unknown:
        near = {name: difflib.get_close_matches(name, known, 1) for name in unknown}
        raise UsageError(
            "cannot deploy with these options",
            because=[
                f"neither partition nor Plan.deploy has {name!r}"
                + (f" (did you mean {near[name][0]!r}?)" if near[name] else "")
                for name in unknown
            ],
        )
    tracing, planning, deploying = (
        {name: value for name, value in options.items() if name in kind} for kind in kinds
    )
    return tracing, planning, deploying


def _keywords(function: Callable[..., Any]) -> set[str]:
    taken = {p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    return taken - {"graph", "example_inputs", "loss_fn"}


def error_as_data(error: Exception) -> dict[str, Any]:
    """Return an error as JSON data: its kind in ``cost_models.errors`` and its text."""
    if not isinstance(error, PartitionerError):
        return {"kind": None, "what": f"{type(error).__name__}: {error}", "because": [], "try": []}
    kind = next(cls for cls in type(error).__mro__ if vars(errors).get(cls.__name__) is cls)
    return {
        "kind": kind.__name__,
        "what": error.what,
        "because": list(error.because),
        "try": list(error.suggestions),
    }


def error_from_data(data: Mapping[str, Any]) -> PartitionerError:
    """Make the same error on another rank."""
    if data["kind"] is None:
        return RankFailureError(
            "rank 0 failed while it planned", because=[data["what"]], suggestions=["read the log of rank 0"]
        )
    kind = vars(errors)[data["kind"]]
    error: PartitionerError = kind(data["what"], data["because"], data["try"])
    return error
