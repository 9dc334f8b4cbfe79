"""Galvatron's JSON: what is written, what is read, and what is refused with its place."""

from __future__ import annotations

import json
import re
from contextlib import suppress

import pytest

from cost_models.errors import UsageError
from partitioner.formats import galvatron
from partitioner.formats.from_plan import parallelism_of
from partitioner.formats.parallelism import Parallelism
from tests.support.formatted_plans import plan_of
from tests.unit.partitioner.formats.mutations import mutated


@pytest.mark.parametrize(
    ("fix", "schedule"),
    [
        ("pipeline=2 tensor=2 data=2 microbatch=1 recompute=full", "1f1b"),
        ("data=8 zero=3 microbatch=2 recompute=none", "auto"),
        ("tensor=4 data=2 microbatch=2 recompute=none", "auto"),
    ],
)
def test_what_is_written_is_read_as_the_same_degrees(fix: str, schedule: str) -> None:
    plan = plan_of(fix, schedule)
    understood = galvatron.read(str(galvatron.write(plan)), 8)
    assert understood.parallelism == parallelism_of(plan)
    assert understood.problems == ()
    assert understood.said == {"layers": 6}


@pytest.mark.parametrize(
    ("fix", "schedule", "reason"),
    [
        ("pipeline=2 data=4 microbatch=1", "zb-h1", "not zb-h1"),
        ("data=8 zero=1 microbatch=1", "auto", "divides gradients"),
        ("sequence=2 data=4 microbatch=1 recompute=gathers", "auto", "not gathers"),
    ],
)
def test_what_it_cannot_run_is_refused(fix: str, schedule: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        galvatron.write(plan_of(fix, schedule))


def _form(layers: int = 4, **changed: object) -> str:
    ones, zeros = ",".join("1" * layers), ",".join("0" * layers)
    form = {
        "pp_deg": 1,
        "tp_sizes_enc": ones,
        "tp_consecutive_flags": ones,
        "dp_types_enc": zeros,
        "use_sp": zeros,
        "checkpoint": zeros,
        "global_bsz": 16,
        "chunks": 2,
        "pp_division": str(layers),
        "pipeline_type": "pipedream_flush",
        "default_dp_type": "zero2",
        "vtp": 1,
        "vsp": 0,
    }
    return json.dumps(
        {name: value for name, value in {**form, **changed}.items() if value is not None}, indent=2
    )


TWO = {"tp_sizes_enc": "2,2,2,2", "vtp": 2}
# Forms as in Hetu-Galvatron's configs, its quick start, its tests of parallel configurations and earlier versions' files
# (without use_sp, vtp and checkpoint).
FORMS = {
    _form(): Parallelism(data=8, zero=1, microbatches=2),
    _form(default_dp_type="ddp"): Parallelism(data=8, microbatches=2),
    _form(default_dp_type="zero3"): Parallelism(data=8, zero=3, microbatches=2),
    _form(dp_types_enc="1,1,1,1", embed_sdp=1): Parallelism(data=8, zero=3, microbatches=2),
    _form(**TWO): Parallelism(tensor=2, data=4, zero=1, microbatch=2, microbatches=2),
    _form(pp_deg=2, pp_division="2,2", chunks=4): Parallelism(
        pipeline=2, data=4, zero=1, microbatches=4, layers=(2, 2)
    ),
    _form(pp_deg=2, pp_division="1,3", pipeline_type="gpipe", chunks=4): Parallelism(
        pipeline=2, data=4, zero=1, microbatches=4, schedule="gpipe", layers=(1, 3)
    ),
    _form(checkpoint="1,1,1,1"): Parallelism(data=8, zero=1, microbatches=2, recompute="full"),
    _form(checkpoint="1,1,0,0"): Parallelism(data=8, zero=1, microbatches=2, recompute="auto"),
    _form(cp_sizes_enc="1,1,1,1", ep_sizes_enc="1,1,1,1", tp_of_ep_sizes_enc="1,1,1,1"): Parallelism(
        data=8, zero=1, microbatches=2
    ),
    _form(use_sp=None, checkpoint=None, vtp=None, vsp=None, pp_division=None): Parallelism(
        data=8, zero=1, microbatches=2
    ),
    _form(layers=32, tp_sizes_enc=",".join("8" * 32), vtp=8, global_bsz=64, chunks=8): Parallelism(
        tensor=8, zero=1, microbatch=8, microbatches=8
    ),
}


@pytest.mark.parametrize("text", FORMS)
def test_forms_that_people_have(text: str) -> None:
    assert galvatron.is_mine("galvatron_config.json", text)
    understood = galvatron.read(text, 8)
    assert understood.parallelism == FORMS[text]
    assert understood.problems == ()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (_form(tp_sizes_enc=None), "tp_sizes_enc is not there"),
        (_form(tp_sizes_enc="1,1,2,2"), "tp_sizes_enc: layers that are divided differently (1, 2)"),
        (_form(dp_types_enc="0,1,1,1"), "dp_types_enc: layers that are divided differently"),
        (_form(checkpoint="1,1"), "checkpoint: 2 layers, tp_sizes_enc has 4"),
        (_form(tp_sizes_enc="1;1"), 'tp_sizes_enc: expected numbers such as "2,2,2", not "1;1"'),
        (_form(use_sp="1,1,1,1"), "use_sp: positions"),
        (_form(ep_sizes_enc="2,2,2,2"), "ep_sizes_enc: experts"),
        (_form(tp_consecutive_flags="0,0,0,0"), "tp_consecutive_flags 0"),
        (_form(pipeline_type="dualpipe"), "pipeline_type: expected one of pipedream_flush, gpipe"),
        (_form()[:-2], "line "),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_place(text: str, place: str) -> None:
    with pytest.raises(UsageError, match=re.escape(place)):
        galvatron.read(text, 8)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (_form(global_bsz=10), "global_bsz 10 is no multiple of 8 replicas × chunks 2"),
        (_form(pp_deg=3), "8 devices are no multiple"),
        (_form(pp_deg=2, pp_division="2,1", chunks=4), "pp_division 2+1 are not 4 layers in 2 stages"),
    ],
)
def test_broken_rules_are_told(text: str, problem: str) -> None:
    assert any(problem in told for told in galvatron.read(text, 8).problems)


def test_mutated_files_are_read_or_refused() -> None:
    for text in mutated(list(FORMS), 10):
        with suppress(UsageError):  # anything else fails
            galvatron.read(text, 8)
