"""A cost graph from a file of any known format: read as data, checked whole, errors with file, place and reason.

bytes ─► text ─► format ─► pydantic or lines ─► PlacementGraph ─► checked
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ValidationError

from cost_models.errors import GraphError, UsageError
from partitioner.cost_graphs import device_placement, own, pipedream
from partitioner.record.file import validation_problems
from passes.search.cost_graph.graph import MOST_DEVICES, PlacementGraph, checked

GraphFormat = Literal["device-placement", "pipedream", "partitioner"]
FileT = TypeVar("FileT", bound=BaseModel)
MOST_BYTES = 1 << 28
MOST_SHOWN = 20
FORMATS = (
    'give JSON of the device-placement benchmark ("maxFPGAs", "nodes", "edges"), a PipeDream graph.txt, '
    "or our own JSON (docs/14-graphs-from-elsewhere.md)"
)


@dataclass(frozen=True)
class ReadGraph:
    """A graph with where it comes from; a PipeDream file has a profile and a bandwidth between devices too."""

    graph: PlacementGraph
    format: GraphFormat
    source: str
    profile: pipedream.PipeDreamProfile | None = None
    bytes_per_second: float = pipedream.DEFAULT_BYTES_PER_SECOND


def read_graph(
    path: str | os.PathLike[str],
    *,
    devices: int | None = None,
    bytes_per_second: float | None = None,
) -> ReadGraph:
    """Read the graph of a file; ``devices`` accelerators replace the number of the file."""
    source = str(path)
    if devices is not None and not 1 <= devices <= MOST_DEVICES:
        raise UsageError(f"cannot plan for {devices} devices", [f"expected 1 to {MOST_DEVICES}"])
    text = _text(source)
    data = _json(text, source)
    if data is None:
        return _pipedream(text, source, devices, bytes_per_second)
    if bytes_per_second is not None:
        raise UsageError(
            "--bandwidth is for PipeDream profiles",
            [f"{source} says itself what outputs cost"],
            ["leave it out"],
        )
    if own.is_own(data):
        name: GraphFormat = "partitioner"
        graph, problems = own.graph_of(_validated(own.OwnGraphFile, data, source))
    elif device_placement.is_device_placement(data):
        name = "device-placement"
        graph, problems = device_placement.graph_of(
            _validated(device_placement.DevicePlacementFile, data, source)
        )
    else:
        keys = ", ".join(map(repr, list(data)[:6])) or "none"
        raise GraphError(f"{source} is no cost graph", [f"its keys are {keys}"], [FORMATS])
    if graph is None:
        raise _not_valid(source, problems)
    if devices is not None:
        graph = replace(graph, machine=replace(graph.machine, accelerators=devices))
    return ReadGraph(checked(graph, source), name, source)


def _pipedream(text: str, source: str, devices: int | None, bytes_per_second: float | None) -> ReadGraph:
    if not pipedream.is_pipedream(text):
        raise GraphError(f"{source} is no cost graph", [f"it begins with {text.strip()[:40]!r}"], [FORMATS])
    if devices is None:
        raise UsageError(
            f"--devices is missing for {source}",
            ["a PipeDream profile does not say how many devices there are"],
            ["add --devices 4, say"],
        )
    bandwidth = pipedream.DEFAULT_BYTES_PER_SECOND if bytes_per_second is None else bytes_per_second
    if not 0 < bandwidth < float("inf"):
        raise UsageError("cannot read --bandwidth", [f"{bandwidth:g} B/s: expected more than 0"])
    profile, problems = pipedream.profile_of(text)
    if profile is None:
        raise _not_valid(source, problems)
    graph = pipedream.graph_of(profile, devices, bandwidth)
    return ReadGraph(checked(graph, source), "pipedream", source, profile, bandwidth)


def _not_valid(source: str, problems: list[str]) -> GraphError:
    more = [f"and {len(problems) - MOST_SHOWN} more problems"] if len(problems) > MOST_SHOWN else []
    return GraphError(
        f"{source} is not a valid cost graph", [*problems[:MOST_SHOWN], *more], ["correct the file"]
    )


def _text(source: str) -> str:
    try:
        with open(source, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror.lower() if isinstance(error, OSError) and error.strerror else str(error)
        raise GraphError(f"cannot read the graph {source}", [reason], [FORMATS]) from error
    if len(data) > MOST_BYTES:
        raise GraphError(f"cannot read the graph {source}", [f"it is larger than {MOST_BYTES:,} bytes"])
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        reason = f"byte {error.start} is not UTF-8 text"
        raise GraphError(f"cannot read the graph {source}", [reason], [FORMATS]) from error
    if not text.strip():
        raise GraphError(f"cannot read the graph {source}", ["it is empty"], [FORMATS])
    return text


def _json(text: str, source: str) -> dict[str, Any] | None:
    """Read the object; None where the text is no JSON at all."""
    if text.lstrip()[0] not in "{[":
        return None
    try:
        data = json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 40 else float("inf"))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}: {error.msg}"
        raise GraphError(f"{source} is not JSON", [where], ["correct the file"]) from error
    except RecursionError as error:
        raise GraphError(f"{source} is no cost graph", ["it is nested too deeply"], [FORMATS]) from error
    if not isinstance(data, dict):
        raise GraphError(f"{source} is no cost graph", ["expected an object, got a list"], [FORMATS])
    return data


def _validated(model: type[FileT], data: dict[str, Any], source: str) -> FileT:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problems = [
            line.replace("is no key of a plan", "is no key here") for line in validation_problems(error)
        ]
        raise GraphError(f"{source} is not a valid cost graph", problems, ["correct the file"]) from error
