"""The trace of a simulated step: the trace event format, its tracks, arrows and counters, and which ranks it shows."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cost_models.errors import UsageError
from runtime.program.order import build_group_programs
from runtime.program.program import TiedGroup
from runtime.schedules import SCHEDULES
from runtime.simulate.simulate import simulate
from runtime.simulate.simulation import Simulation, equal_ranks
from runtime.simulate.trace_events import chrome_trace, save_trace
from tests.support.uniform_links import UniformLinks
from tests.unit.runtime.program.test_between_groups import pipeline
from tests.unit.runtime.schedules.helpers import no_time

NUMBER = {"type": "number", "minimum": 0}
PLACE = {"pid": {"type": "integer"}, "tid": {"type": "integer"}}
TEXT = {"type": "string"}


def of_phase(phase: str, required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of one kind of event."""
    known = {"ph": {"const": phase}, "name": TEXT, "cat": TEXT, **PLACE, **properties}
    return {
        "type": "object",
        "required": ["name", "ph", "pid", *required.split()],
        "properties": known,
        "additionalProperties": False,
    }


FORMAT = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    of_phase("M", "args", args={"type": "object"}),
                    of_phase("X", "tid ts dur cat", ts=NUMBER, dur=NUMBER, args={"type": "object"}),
                    of_phase(
                        "C", "ts args", ts=NUMBER, args={"type": "object", "additionalProperties": NUMBER}
                    ),
                    of_phase("s", "tid ts id cat", ts=NUMBER, id={"type": ["integer", "string"]}),
                    of_phase(
                        "f",
                        "tid ts id cat bp",
                        ts=NUMBER,
                        id={"type": ["integer", "string"]},
                        bp={"const": "e"},
                    ),
                ]
            },
        },
    },
}
"""The part of Chrome's "Trace Event Format" (its JSON object form) that traces use: complete, counter, flow and metadata
events, with the keys that each must have. Times are microseconds."""


def step(*sizes: int, microbatches: int = 3, state_bytes: tuple[int, ...] = ()) -> Simulation:
    """Simulate a pipeline of groups of these sizes, whose messages take time."""
    graph = pipeline(sizes)
    orders = SCHEDULES["1f1b"].order(graph, microbatches)
    summed = [TiedGroup(("w",), tuple(range(sizes[0])))] if sizes[0] > 1 else []
    groups = build_group_programs(graph, orders, microbatches, transfer_seconds=no_time, tied=summed)
    return simulate(groups, links=UniformLinks(10.0), state_bytes=state_bytes)


def events(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def processes(trace: dict[str, Any]) -> dict[str, int]:
    """Return the processes by their names."""
    return {e["args"]["name"]: e["pid"] for e in events(trace, "M") if e["name"] == "process_name"}


def tracks(trace: dict[str, Any]) -> dict[tuple[int, int], str]:
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events(trace, "M") if e["name"] == "thread_name"}


@pytest.mark.parametrize("simulation", [step(1, 1), step(2, 2), step(4, 2, 1)], ids=["1-1", "2-2", "4-2-1"])
@pytest.mark.parametrize("ranks", [None, (0, 1)])
def test_the_trace_has_the_format_that_is_written_down(
    simulation: Simulation, ranks: tuple[int, ...] | None
) -> None:
    trace = json.loads(json.dumps(chrome_trace(simulation, ranks=ranks)))
    jsonschema.Draft202012Validator(FORMAT).validate(trace)
    named = tracks(trace)
    by_track: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in events(trace, "X"):
        by_track[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert set(by_track) <= set(named), "a track without a name"
    for slices in by_track.values():
        assert all(before[1] <= after[0] + 1e-3 for before, after in pairwise(sorted(slices)))


def test_every_instruction_message_and_arrow_is_there_once() -> None:
    simulation = step(1, 1)
    trace = chrome_trace(simulation)
    named = tracks(trace)
    lanes: dict[str, list[str]] = defaultdict(list)
    for event in events(trace, "X"):
        lanes[f"{event['pid']} {named[event['pid'], event['tid']]}"].append(event["name"])
    assert lanes["0 compute"] == ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2", "step"]
    assert sorted(lanes["0 sends"]) == sorted(lanes["1 receives"])
    assert len(lanes["0 sends"]) + len(lanes["1 sends"]) == simulation.message_count == 6
    starts, ends = events(trace, "s"), events(trace, "f")
    assert [e["id"] for e in starts] == [e["id"] for e in ends] == list(range(6))
    for start, end in zip(starts, ends, strict=True):
        assert named[start["pid"], start["tid"]].startswith("sends")
        assert named[end["pid"], end["tid"]].startswith("receives")
        assert start["pid"] != end["pid"]
        assert start["ts"] <= end["ts"]


def test_the_counter_reaches_the_peak() -> None:
    simulation = step(1, 1)
    for rank in (0, 1):
        counted = [e["args"]["bytes"] for e in events(chrome_trace(simulation), "C") if e["pid"] == rank]
        assert max(counted) == simulation.peak_bytes[rank]
        assert all(before != after for before, after in pairwise(counted))


def test_equal_ranks_are_shown_once_unless_asked_for() -> None:
    simulation = step(2, 2)
    assert equal_ranks(simulation) == [(0, 1), (2, 3)]
    assert list(processes(chrome_trace(simulation))) == ["ranks 0-1", "ranks 2-3"]
    assert list(processes(chrome_trace(simulation, ranks=range(4)))) == [f"rank {r}" for r in range(4)]
    alone = chrome_trace(simulation, ranks=(3,))
    assert list(processes(alone)) == ["rank 3"]
    assert not events(alone, "s"), "an arrow to a rank that is not shown"
    assert [e for e in events(alone, "X") if "from" in e.get("args", {})]


def test_ranks_that_hold_other_bytes_are_not_equal() -> None:
    assert equal_ranks(step(2, 2, state_bytes=(0, 1, 0, 0))) == [(0,), (1,), (2, 3)]


def test_sums_of_gradients_have_a_track_of_their_own() -> None:
    trace = chrome_trace(step(2, 1))
    named = tracks(trace)
    found = {named[e["pid"], e["tid"]] for e in events(trace, "X") if e["cat"] == "reduce gradients"}
    assert found == {"sums of gradients"}


def test_two_steps_are_told_apart() -> None:
    simulation = step(1, 1)
    trace = chrome_trace(simulation, "measured", first=5)
    assert processes(trace) == {"rank 0 measured": 5, "rank 1 measured": 6}
    assert {e["id"] for e in events(trace, "s")} == {f"measured{n}" for n in range(6)}


def test_a_file_ending_in_gz_is_packed_and_holds_the_same(tmp_path: Path) -> None:
    trace = chrome_trace(step(4, 4, microbatches=40))
    plain, packed = tmp_path / "trace.json", tmp_path / "trace.json.gz"
    save_trace(plain, trace)
    save_trace(packed, trace)
    assert json.loads(plain.read_text()) == trace
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert packed.stat().st_size * 4 < plain.stat().st_size
    with pytest.raises(UsageError, match="cannot write the trace"):
        save_trace(tmp_path / "nowhere" / "trace.json", trace)
