"""The content of a plan file: what was chosen for each stage, op and tensor, and what it should cost. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, PlainSerializer, PlainValidator, WithJsonSchema

from cost_models.cluster import ClusterSpec
from cost_models.errors import UsageError
from cost_models.precision import DTYPE_FIELDS, NAMES, Precision
from partitioner.record.compact import BytesByDevice, DeviceGroup, SecondsByDevice
from partitioner.record.file import Amount, CertificateField, Natural, PlanFile, Record, Upgrade
from partitioner.record.outline import ModelOutline
from partitioner.record.sharding import StageSharding
from passes.lower.crossing import Bridge
from passes.search.certificate import Alternative
from passes.search.words import RecomputeMode
from passes.split.split import Split


def _from_1(data: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in data.items() if key != "placements"} | {"schema_version": 2}


UPGRADES: Mapping[int, Upgrade] = {1: _from_1}
"""Version -> what makes it the next one.

1 -> 2   ``placements`` (op -> devices) is gone: stages name their ops and devices. Groups and tables by device may be
         written briefly (``partitioner.record.compact``); plain lists and tables, as schema 1 has them, are read too
"""


def _read_precision(value: object) -> Precision:
    if isinstance(value, Precision):
        return value
    if not isinstance(value, dict) or not all(isinstance(word, str) for word in value.values()):
        raise ValueError('an object such as {"compute": "bfloat16"} is expected')
    try:
        return Precision.from_fields(value)
    except UsageError as error:
        raise ValueError("; ".join(error.because)) from error


PrecisionField = Annotated[
    Precision,
    PlainValidator(_read_precision),
    PlainSerializer(Precision.fields),
    WithJsonSchema(
        {
            "type": "object",
            "properties": {
                **{name: {"enum": sorted(NAMES.values())} for name in DTYPE_FIELDS},
                "loss_scale": {"const": "dynamic"},
            },
            "additionalProperties": False,
        }
    ),
]
"""A :class:`Precision`; in JSON an object of what is fixed, {} for the model's own data types."""


StateKind: TypeAlias = Literal["parameters", "gradients", "optimizer", "batch"]
MemoryPart: TypeAlias = Literal["context", "communicators", "allocator"]
"""A part of a process's memory that is no tensors': the driver's context, NCCL's communicators, what torch's allocator
reserves beyond the tensors."""
"""The kinds of what a device holds all through a step; copies of parameters for the update count as the optimizer's."""


class ModelInfo(Record):
    """The model that the plan is for. ``fingerprint`` covers the graph, its shapes and its parameter names."""

    name: str
    fingerprint: str
    parameters: Natural = Field(description="number of parameters, tied ones counted once")
    parameter_bytes: Natural
    dtype: str | None = Field(description="floating-point type of most parameters")
    trainable_parameters: Natural
    ops: Natural


class Stage(Record):
    """One segment of the model. Seconds are per micro-batch, bytes those of each of the stage's devices."""

    devices: DeviceGroup
    ops: tuple[str, ...]
    modules: tuple[str, ...] = Field(
        description="outermost module paths that lie wholly inside, or 'path (part)'"
    )
    parameter_bytes: Natural
    forward_seconds: Amount
    backward_seconds: Amount
    backward_input_seconds: Amount = Field(
        description="the part of backward_seconds that earlier stages wait for"
    )
    backward_weight_seconds: Amount = Field(description="the part of backward_seconds that can be deferred")
    saved_bytes: Natural = Field(description="held from forward to backward, per micro-batch in flight")
    weight_saved_bytes: Natural = Field(description="still held by a deferred weight half, per micro-batch")
    recomputed_blocks: tuple[str, ...] = Field(
        description="modules (a number after #: a later call) whose activations backward computes again; "
        "gathers: products with parameters, each by itself, so that what was gathered for it is gathered again; "
        "selective: attentions, from the product of query and key to that with the values"
    )
    transient_bytes: Natural = Field(description="the most that is held on top while backward runs")
    first_transient_bytes: Natural = Field(
        default=0,
        description="the same of a step's first backward, with the gradients of parameters that it makes",
    )
    gradient_bytes: Natural = Field(
        default=0,
        description="gradients of parameters that are not there before the first backward has made them",
    )
    has_backward: bool
    sharding: StageSharding | None = Field(
        default=None, description="how several devices share the stage; null for one"
    )
    in_flight: Natural = Field(description="largest number of micro-batches in flight in the simulated step")


class StageValue(Record):
    """A tensor that a later stage reads (on the same device or another)."""

    name: str
    producer: Natural = Field(description="stage")
    consumers: tuple[Natural, ...] = Field(description="stages")
    size_bytes: Natural = Field(description="per micro-batch, on a device of its producer")
    needs_grad: bool
    shape: tuple[Natural, ...] = Field(
        default=(), description="of all devices' parts together, in a micro-batch"
    )
    element_bytes: Natural = Field(default=0, description="of one of its numbers")


class TiedParameter(Record):
    """A trainable parameter that several ranks hold; its gradients are summed before the optimizer."""

    name: str
    ranks: DeviceGroup
    size_bytes: Natural


class ViewRecord(Record):
    """A tensor of the model without a memory of its own: ranks hold its owner, and compute it from that."""

    name: str
    owner: str = Field(description="the parameter or buffer whose memory it is")
    view: str = Field(description="what it is of the owner, such as a.weight[0:2]")


class Prediction(Record):
    """The cost of the simulated step. ``confidence`` names what the numbers rest on."""

    step_seconds: float = Field(gt=0)
    samples_per_second: float = Field(gt=0)
    tokens_per_second: float | None = Field(ge=0)
    mfu: float | None = Field(
        ge=0, description="model FLOPs utilisation: useful FLOP/s over the devices' peak"
    )
    bubble_fraction: float = Field(ge=0, le=1)
    peak_memory_bytes: BytesByDevice = Field(description="per device, as its driver counts it, keyed by rank")
    beside_tensors: dict[MemoryPart, BytesByDevice] = Field(
        default_factory=dict,
        description="what of the peaks is no tensors', by rank; earlier plans and plans for CPUs have tensors alone",
    )
    communication_bytes: Natural = Field(
        description="sent by all devices in one step: messages, and collectives by the volume of their algorithms"
    )
    messages: Natural = Field(description="point-to-point, in one step")
    collectives: Natural = Field(
        default=0, description="in one step, by all groups of devices; sums of gradients among them"
    )
    confidence: str

    def memory_parts(self, rank: int) -> dict[str, int]:
        """Return the parts of a rank's peak by name: "tensors", what torch counts as allocated, and what is beside them."""
        beside: dict[str, int] = {part: table[str(rank)] for part, table in self.beside_tensors.items()}
        return {"tensors": self.peak_memory_bytes[str(rank)] - sum(beside.values()), **beside}

    def utilization(self, batch_size: int, samples_per_second: float) -> float | None:
        """Return the model FLOPs utilisation (MFU) at this rate; None if the plan has none.

        MFU = model FLOPs per sample · samples per second / peak FLOP/s of the devices. The plan's own MFU is the same at
        its predicted rate, so their ratio is that of the rates.
        """
        if self.mfu is None:
            return None
        return self.mfu * samples_per_second * self.step_seconds / batch_size


class RiskRecord(Record):
    """The chance that the devices' memory does not do, by how far off predicted peaks were when the plan was made."""

    allowed: float = Field(gt=0, le=1, description="the chance that plans were to have at most")
    chance: float = Field(
        ge=0, le=1, description="the plan's own: above allowed only where nothing safer was found"
    )
    room_bytes: BytesByDevice = Field(
        description="what the plan keeps within by prediction, by rank; the memory where its chance is above allowed"
    )
    ways: tuple[str, ...] = Field(
        default=(), description="changes with which a plan is safe, with their price, where this one is not"
    )


class ProofRecord(Record):
    """The proof of the plan's programs, by the checker."""

    instructions: Natural
    messages: Natural
    rules: tuple[str, ...]


class PlanFields(PlanFile):
    """Everything that a plan file holds. What must hold between the fields: ``partitioner.record.checks``."""

    _version: ClassVar[int] = 2
    _upgrades: ClassVar[Mapping[int, Upgrade]] = UPGRADES

    schema_version: Literal[2] = 2
    partitioner_version: str
    model: ModelInfo
    cluster: ClusterSpec
    strategy: Literal["layer", "feature", "hybrid", "free", "auto"]
    batch_size: int = Field(ge=1, description="samples per optimizer step")
    microbatches: int = Field(ge=1)
    schedule: str
    one_queue: bool = Field(
        default=False,
        description="whether devices may have one queue for all messages and collectives, as NCCL may",
    )
    optimizer_memory: str
    precision: PrecisionField
    loss_reduction: Literal["mean", "sum", "token_mean"] = Field(
        description="micro-batches' losses count by their samples, are summed, or count by their valid labels"
    )
    opaque: tuple[str, ...] = Field(
        default=(), description="paths of modules that were asked to run whole, as one op each"
    )
    recompute: RecomputeMode = Field(
        description="whether backward may compute blocks' activations again: auto, where memory asks for it"
    )
    splits: tuple[Split, ...] = Field(
        default=(), description="ops that are run in blocks of neurons; the rest of the plan names the blocks"
    )
    stages: tuple[Stage, ...]
    recomputed: tuple[str, ...] = Field(description="cheap ops that every stage recomputes for itself")
    tied: tuple[TiedParameter, ...] = Field(description="trainable parameters held by several ranks")
    views: tuple[ViewRecord, ...] = Field(
        default=(),
        description="buffers, and attributes that forward reads, which share another tensor's memory",
    )
    values: tuple[StageValue, ...] = Field(description="what crosses between stages")
    transfers: tuple[Bridge, ...] = Field(description="what crosses between devices: the bridges")
    state_bytes: BytesByDevice = Field(
        description="parameters, gradients, optimizer state, its part of the batch, by rank"
    )
    state_parts: dict[StateKind, BytesByDevice] = Field(
        default_factory=dict,
        description="what state_bytes is made of, for pictures; earlier plans do not say",
    )
    optimizer_seconds: SecondsByDevice = Field(description="time of the optimizer step, by rank")
    update_bytes: BytesByDevice = Field(
        default_factory=dict,
        description="what the optimizer holds on top while it steps, by rank; earlier plans do not say",
    )
    attention_backend: str | None = Field(description="which attention the memory prediction assumes")
    prediction: Prediction
    risk: RiskRecord | None = Field(default=None, description="earlier plans have none: they fill the memory")
    certificate: CertificateField
    alternatives: tuple[Alternative, ...]
    not_considered: tuple[str, ...] = Field(description="what this strategy does not look at")
    proof: ProofRecord
    notes: tuple[str, ...]
    outline: ModelOutline | None = Field(
        default=None, description="the model's ops and what they read, for pictures; earlier plans have none"
    )
