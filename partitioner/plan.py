"""Plan: what was chosen, what it should cost, why, and how sure. Data only: JSON, safe to load from anyone."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cost_models.cluster import ClusterSpec
from cost_models.errors import PlanError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from partitioner.api import ModelOrTrace
    from partitioner.deploy import Deployment
    from partitioner.verify import VerifyReport
    from runtime.simulate import Simulation

SCHEMA_VERSION = 1


class _Record(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelInfo(_Record):
    """Which model the plan is for. ``fingerprint`` covers the graph, its shapes and its parameter names."""

    name: str
    fingerprint: str
    parameters: int = Field(ge=0, description="number of parameters, tied ones counted once")
    parameter_bytes: int = Field(ge=0)
    trainable_parameters: int = Field(ge=0)
    ops: int = Field(ge=0)


class Stage(_Record):
    """One segment of the model. Seconds are per micro-batch on the stage's device."""

    devices: tuple[int, ...]
    ops: tuple[str, ...]
    modules: tuple[str, ...] = Field(
        description="outermost module paths that lie wholly inside, or 'path (part)'"
    )
    parameter_bytes: int
    forward_seconds: float
    backward_seconds: float
    backward_input_seconds: float = Field(
        description="the part of backward_seconds that earlier stages wait for"
    )
    backward_weight_seconds: float = Field(description="the part of backward_seconds that can be deferred")
    saved_bytes: int = Field(description="held from forward to backward, per micro-batch in flight")
    weight_saved_bytes: int = Field(description="still held by a deferred weight half, per micro-batch")
    has_backward: bool
    in_flight: int = Field(description="largest number of micro-batches in flight in the simulated step")


class StageValue(_Record):
    """A tensor that a later stage reads (on the same device or another)."""

    name: str
    producer: int = Field(description="stage")
    consumers: tuple[int, ...] = Field(description="stages")
    size_bytes: int = Field(description="per micro-batch")
    needs_grad: bool


class Transfer(_Record):
    """A bridge: one value sent from a device to another, once per micro-batch."""

    value: str
    kind: str
    source: int
    target: int
    size_bytes: int = Field(description="per micro-batch, one direction")
    gradient: bool = Field(description="whether its gradient is sent back")


class TiedParameter(_Record):
    """A trainable parameter that several ranks hold; its gradients are summed before the optimizer."""

    name: str
    ranks: tuple[int, ...]
    size_bytes: int


class Prediction(_Record):
    """What the simulated step costs. ``confidence`` names what the numbers rest on."""

    step_seconds: float
    samples_per_second: float
    tokens_per_second: float | None
    mfu: float | None = Field(description="model FLOPs utilisation: useful FLOP/s over the devices' peak")
    bubble_fraction: float
    peak_memory_bytes: dict[str, int] = Field(description="per device, keyed by rank")
    communication_bytes: int = Field(description="sent by all devices in one step")
    messages: int
    confidence: str


class CertificateRecord(_Record):
    """How good the plan is known to be: the surrogate's proved bound, and a bound on the simulated time."""

    objective: str
    objective_seconds: float
    bound_seconds: float
    gap: float
    simulated_lower_bound_seconds: float
    space: str
    method: str
    solver_status: str
    search_seconds: float


class Alternative(_Record):
    """What else was looked at, and why it was not chosen."""

    strategy: str
    feasible: bool
    reason: str
    step_seconds: float | None
    peak_memory_bytes: int | None


class ProofRecord(_Record):
    """What the checker proved of the plan's programs."""

    instructions: int
    messages: int
    rules: tuple[str, ...]


class Plan(_Record):
    """A partitioning plan. Made by :func:`partitioner.partition`, or loaded from a file."""

    schema_version: Literal[1] = SCHEMA_VERSION
    partitioner_version: str
    model: ModelInfo
    cluster: ClusterSpec
    strategy: Literal["layer", "feature", "hybrid", "free", "auto"]
    batch_size: int = Field(ge=1, description="samples per optimizer step")
    microbatches: int = Field(ge=1)
    schedule: str
    optimizer_memory: str
    stages: tuple[Stage, ...]
    placements: dict[str, tuple[int, ...]] = Field(description="ranks of every placed op")
    recomputed: tuple[str, ...] = Field(description="cheap ops that every stage recomputes for itself")
    tied: tuple[TiedParameter, ...] = Field(description="trainable parameters held by several ranks")
    values: tuple[StageValue, ...] = Field(description="what crosses between stages")
    transfers: tuple[Transfer, ...] = Field(description="what crosses between devices: the bridges")
    state_bytes: dict[str, int] = Field(description="parameters, gradients and optimizer state, by rank")
    optimizer_seconds: dict[str, float] = Field(description="time of the optimizer step, by rank")
    attention_backend: str | None = Field(description="which attention the memory prediction assumes")
    prediction: Prediction
    certificate: CertificateRecord
    alternatives: tuple[Alternative, ...]
    not_considered: tuple[str, ...] = Field(description="what this strategy does not look at")
    proof: ProofRecord
    notes: tuple[str, ...]

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        world = self.cluster.world_size
        problems: list[str] = []
        if not self.stages:
            problems.append("stages: there is none")
        if self.microbatches > self.batch_size:
            problems.append(f"microbatches: {self.microbatches} pieces of a batch of {self.batch_size}")
        problems += [
            f"values[{index}]: {value.name} goes from stage {value.producer} to {value.consumers} of {len(self.stages)}"
            for index, value in enumerate(self.values)
            if not all(value.producer < consumer < len(self.stages) for consumer in value.consumers)
            or value.producer < 0
        ]
        missing = [str(rank) for rank in range(world) if str(rank) not in self.state_bytes]
        if missing:
            problems.append(f"state_bytes: no entry for ranks {', '.join(missing[:5])}")
        for index, stage in enumerate(self.stages):
            problems += [
                f"stages[{index}].devices: rank {rank} is not in the cluster of {world}"
                for rank in stage.devices
                if not 0 <= rank < world
            ]
            problems += [
                f"placements[{op!r}] is {self.placements.get(op)} but stages[{index}].devices is {stage.devices}"
                for op in stage.ops
                if self.placements.get(op) != stage.devices
            ][:3]
        staged = [op for stage in self.stages for op in stage.ops]
        if len(staged) != len(set(staged)):
            problems.append("stages: an op stands in two stages")
        if set(staged) != set(self.placements):
            problems.append("placements and stages do not name the same ops")
        if problems:
            raise ValueError("; ".join(problems[:10]))
        return self

    # ------------------------------------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON. Atomic: a crash leaves the previous file, never half of a new one."""
        target = Path(path)
        text = self.model_dump_json(indent=1) + "\n"
        try:
            descriptor, temporary = tempfile.mkstemp(
                dir=target.parent, prefix=f".{target.name}.", suffix=".tmp"
            )
        except OSError as error:
            raise PlanError(f"cannot write the plan to {target}", because=[str(error)]) from error
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
            Path(temporary).chmod(0o644)
            Path(temporary).replace(target)
        except OSError as error:
            Path(temporary).unlink(missing_ok=True)
            raise PlanError(f"cannot write the plan to {target}", because=[str(error)]) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file. Raises PlanError with every problem found."""
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(
                f"cannot read the plan {path}",
                because=[str(error)],
                suggestions=["give the file that `partitioner plan -o` wrote"],
            ) from error
        return cls.from_json(text, source=str(path))

    @classmethod
    def from_json(cls, text: str, *, source: str = "<text>") -> Plan:
        """Parse a plan; ``source`` names it in errors."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(
                f"{source} is not JSON",
                because=[f"line {error.lineno}, column {error.colno}: {error.msg}"],
                suggestions=["make the plan anew with `partitioner plan … -o plan.json`"],
            ) from error
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise PlanError(
                f"{source} is no plan of a version this partitioner reads",
                because=[f"schema_version is {version!r}, expected {SCHEMA_VERSION}"],
                suggestions=["make the plan anew with `partitioner plan … -o plan.json`"],
            )
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise PlanError(
                f"{source} is not a valid plan",
                because=[f"{_key_path(e['loc'])}: {e['msg']}" for e in error.errors()[:20]],
                suggestions=[
                    "make the plan anew with `partitioner plan … -o plan.json`; plans are not meant to be edited"
                ],
            ) from error

    # ------------------------------------------------------------------------------------------ views

    @property
    def world_size(self) -> int:
        """Number of ranks that run it: one more than the highest rank used."""
        return 1 + max(rank for stage in self.stages for rank in stage.devices)

    def __str__(self) -> str:
        from partitioner.report.table import render_plan

        return render_plan(self)

    def launch_command(self, model: str = "MODEL", plan_file: str = "plan.json", steps: int = 10) -> str:
        """The torchrun command(s) that run it: one line per node."""
        from partitioner.report.launch import launch_command

        return launch_command(self, model, plan_file, steps)

    def diff(self, other: Plan) -> str:
        """What differs between two plans, as text; empty if nothing does."""
        from partitioner.report.diff import diff_plans

        return diff_plans(self, other)

    # ------------------------------------------------------------------------------------------ use

    def simulate(self) -> Simulation:
        """Rebuild the plan's programs, prove them again, and simulate one training step. Needs no model."""
        from partitioner.rebuild import simulate_plan

        return simulate_plan(self)

    def verify(self, model: ModelOrTrace, **options: Any) -> VerifyReport:
        """Run the actual plan on local Gloo processes and compare every number with the unpartitioned model."""
        from partitioner.verify import verify_plan

        return verify_plan(self, model, **options)

    def deploy(self, model: ModelOrTrace, **options: Any) -> Deployment:
        """This rank's share, ready for ``train_step``; under torchrun, called on every rank."""
        from partitioner.deploy import deploy_plan

        return deploy_plan(self, model, **options)

    def to_dict(self) -> Mapping[str, Any]:
        """The plan as plain JSON data."""
        data: dict[str, Any] = json.loads(self.model_dump_json())
        return data


def _key_path(location: tuple[int | str, ...]) -> str:
    """("stages", 0, "ops") -> "stages[0].ops"."""
    path = ""
    for key in location:
        path += f"[{key}]" if isinstance(key, int) else f".{key}" if path else str(key)
    return path or "(the whole file)"
