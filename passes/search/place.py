"""One search for stages: on single devices, on device groups, and one that all devices share.

strategy    families of pipelines (``passes.search.provider``)
layer       stages on single devices, cut anywhere
feature     one stage, sharded over all devices in any way
hybrid      stages on device groups; then both of the above, as far as they may be faster
hybrid, something fixed        the first of these, restricted (``passes.search.hybrid.fixed``)

Each of them looks at the whole cluster, then at its parts (``passes.search.parts``), as far as they may be faster.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from cost_models.devices import Device
from cost_models.variants import part_of
from passes.graph.blocks import GATHERS, SELECTIVE, attention_of
from passes.search.fastest import fastest_of
from passes.search.feature.place import FeatureRequest
from passes.search.feature.provider import MeshProvider
from passes.search.hybrid.known import known_recipes
from passes.search.hybrid.provider import GroupsProvider
from passes.search.hybrid.request import HybridRequest
from passes.search.hybrid.search import GroupSearch
from passes.search.judge import Judge, Simulated
from passes.search.layer.provider import LayerProvider
from passes.search.layer.request import LayerRequest
from passes.search.outcome import Outcome
from passes.search.parts import OnPart, Part, parts
from passes.search.provider import Provider
from passes.search.words import of_activations
from passes.shard.discover import Discovery

MOST_DEVICES_OF_A_MESH = 1024
"""Devices up to which the hybrid search looks at one stage on general meshes too, shards across nodes included: beyond,
there are many meshes, each takes seconds to price (docs/06c-feature-wise.md), and shards across many nodes do not win."""

StagesRequest = LayerRequest | FeatureRequest | HybridRequest


def place_stages(request: StagesRequest, judge: Judge) -> Outcome:
    """Return the fastest pipeline of the request's families that fits, in simulation, with its certificate.

    Raises UsageError for what cannot hold, InfeasibleError with ways out if nothing fits, TimeLimitError if nothing was
    found in time.
    """
    limit = request.time_limit_seconds
    deadline = math.inf if limit is None else time.perf_counter() + limit
    groups = _groups(judge, request) if isinstance(request, HybridRequest) else None
    if groups is not None and groups.search.fixed is not None:
        groups.plan = partial(_planned, judge, deadline)
    discovery = Discovery.stored()
    providers = _providers(judge, request, groups, discovery)
    rows = (
        known_recipes(groups, request)
        if isinstance(request, HybridRequest) and request.open and groups and not request.only_fits
        else ()
    )
    parts_of = list(_parts(judge, request, groups, discovery))
    return fastest_of(providers, judge, deadline, parts_of, request.gap, rows, only_fits=request.only_fits)


def _groups(judge: Judge, request: HybridRequest) -> GroupsProvider:
    recompute = request.fix.recompute or request.recompute
    search = GroupSearch(
        judge.graph,
        judge.costs,
        judge.cluster,
        request.job,
        request.microbatches,
        request.schedule,
        of_activations(recompute),
        within=SELECTIVE if recompute == "selective" else "",
    )
    search = search if request.open else search.fixing(request)
    return GroupsProvider(search, judge, request.fix.one_queue(judge.cluster))


def _planned(judge: Judge, deadline: float, request: HybridRequest) -> Simulated:
    """Plan a request in which other things are fixed than in one of which nothing fits."""
    return fastest_of(_fixed(request, _groups(judge, request)), judge, deadline).best


def _parts(
    judge: Judge, request: StagesRequest, groups: GroupsProvider | None, discovery: Discovery
) -> Iterator[Part]:
    """Yield the parts of the cluster that a plan may make do with; none where its devices are fixed, no device alone where
    layouts are: they would say nothing there."""
    if isinstance(request, FeatureRequest) and request.mesh is not None:
        return
    if isinstance(request, HybridRequest) and not request.open:
        return
    costs, cluster = judge.costs, judge.cluster

    @cache
    def work_seconds(device: Device) -> float:
        return costs.least_work_seconds(request.job.batch_size, [device])

    def floor_seconds(ranks: Sequence[int]) -> float:
        return min(map(work_seconds, cluster.unlike(ranks))) / len(ranks)

    for ranks in parts(cluster, floor_seconds):
        if isinstance(request, FeatureRequest) and request.pins and len(ranks) == 1:
            continue

        def providers(ranks: tuple[int, ...] = ranks) -> list[Provider[Any]]:
            own = Judge(judge.graph, costs, part_of(cluster, ranks), request.job)
            on_part = None if groups is None else replace(groups, search=groups.search.on(ranks))
            return [
                OnPart(found, ranks, range(cluster.world_size) if found is on_part else ranks)
                for found in _providers(own, request, on_part, discovery)
            ]

        yield Part(ranks, floor_seconds(ranks), providers)


def _providers(
    judge: Judge, request: StagesRequest, groups: GroupsProvider | None, discovery: Discovery
) -> list[Provider[Any]]:
    """List the families of pipelines; ``groups`` is one of them unless None."""
    if isinstance(request, LayerRequest):
        return [LayerProvider(judge, request)]
    if isinstance(request, FeatureRequest):
        return [MeshProvider(judge, request, discovery)]
    assert groups is not None
    if not request.open:
        return _fixed(request, groups)
    job, counts, recompute = request.job, request.microbatches, request.fix.recompute or request.recompute
    single = LayerRequest(
        job, microbatches=counts, schedule=request.schedule, recompute=of_activations(recompute)
    )
    found: list[Provider[Any]] = [groups]
    if recompute != "selective":
        found.append(LayerProvider(judge, single))
    one_stage = groups.search.counts and request.schedule == "auto"
    if one_stage and 1 < judge.cluster.world_size <= MOST_DEVICES_OF_A_MESH:
        mesh = FeatureRequest(job, microbatches=counts, recompute=recompute)
        found.append(MeshProvider(judge, mesh, discovery))
    return [*found[1:], groups] if request.only_fits else found  # the slowest to say so comes last


def _fixed(request: HybridRequest, groups: GroupsProvider) -> list[Provider[Any]]:
    """List what fills in the rest: the search itself, and restrictions of it that may simulate better than it reckons.

    gathers, selective                   if memory is short: less than whole blocks again in backward
    zero=1, zero=3, all blocks again     if nothing fits: the leanest, however little they save
    """
    search, fix = groups.search, request.fix
    assert search.fixed is not None
    recompute, degrees = fix.recompute or request.recompute, search.fixed.degrees
    replicated = any(run.replicas > 1 for option in search.options() for run in option.runs)
    found: list[Provider[Any]] = [groups]

    def keeping(zero: int) -> GroupSearch:
        return search.fixing(replace(request, fix=replace(fix, zero=zero)))

    open_zero = fix.zero is None and replicated and degrees.tensor is not None
    several = any(len(group) > 1 for group in degrees.groups)
    for within, there in ((GATHERS, several), (SELECTIVE, bool(attention_of(search.graph)))):
        if there and recompute == "auto":
            less = replace(search, within=within)
            found.append(replace(groups, search=less, only_if="short of memory", beside=groups))
    leanest = [keeping(zero) for zero in (1, 3)] if open_zero else []
    leanest += [replace(search, recompute="full")] if recompute == "auto" else []
    return [*found, *(replace(groups, search=lean, only_if="nothing fits") for lean in leanest)]
