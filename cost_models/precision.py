"""Precision: the data type in which each tensor of a training step lives.

Per floating-point parameter of the model, ``Precision.of(its data type)`` says

    leaf       what the graphs read: ``compute``, else the stored type
    stored     what ``state_dict`` has: ``parameters``, else the model's own type
    owner      what the optimizer updates and checkpoints keep: ``master`` where that is wider, else the stored type
    gradient   what micro-batches are summed in, over ranks too, and clipped: ``gradients``, else at least 32 bits

| model    | Precision(…)                               | leaf | stored | owner | gradient |                              |
|----------|--------------------------------------------|------|--------|-------|----------|------------------------------|
| float32  |                                            | f32  | f32    | f32   | f32      | one tensor is leaf and owner |
| float32  | compute=bfloat16                           | bf16 | f32    | f32   | f32      | mixed precision              |
| bfloat16 |                                            | bf16 | bf16   | bf16  | f32      | small updates are lost       |
| bfloat16 | master=float32                             | bf16 | bf16   | f32   | f32      | master copies                |
| float32  | parameters=bfloat16, master=float32        | bf16 | bf16   | f32   | f32      | the same, from float32       |
| float32  | compute=float16, loss_scale="dynamic"      | f16  | f32    | f32   | f32      | float16 needs the loss scale |
| float16  | master=float32, loss_scale="dynamic"       | f16  | f16    | f32   | f32      |                              |
| float64  |                                            | f64  | f64    | f64   | f64      |                              |

Buffers and parameters that are not floating point keep their type, and so do the parameters of batch norms, which
live with their running statistics. Frozen parameters have no gradient and no master copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Literal, TypeAlias

import torch

from cost_models.errors import UsageError

LossScaling: TypeAlias = Literal["dynamic"]

WORDS: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "bf16": torch.bfloat16,
        "bfloat16": torch.bfloat16,
        "fp16": torch.float16,
        "float16": torch.float16,
        "fp32": torch.float32,
        "float32": torch.float32,
        "fp64": torch.float64,
        "float64": torch.float64,
    }
)
"""Names in files and on command lines of the types that can be trained in."""
NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: word for word, dtype in WORDS.items()})
"""The name that torch has for each of them (the later word of each pair above)."""
DTYPE_FIELDS = ("compute", "parameters", "gradients", "master")
ACCUMULATION = torch.float32
"""Type of the sums of 16-bit gradients: a bfloat16 sum stops growing after 256 equal terms."""


@dataclass(frozen=True)
class ParameterPrecision:
    """The data types of one parameter; see the module's table."""

    leaf: torch.dtype
    stored: torch.dtype
    owner: torch.dtype
    gradient: torch.dtype

    @classmethod
    def plain(cls, dtype: torch.dtype) -> ParameterPrecision:
        """Make the precision of one type for everything: of buffers, and of what is not floating point."""
        return cls(dtype, dtype, dtype, dtype)

    @property
    def has_copy(self) -> bool:
        """True if leaf and owner need memory of their own each."""
        return self.leaf != self.owner


@dataclass(frozen=True)
class Precision:
    """The data types that the user fixes; None is the model's own. Raises UsageError for what cannot be trained."""

    compute: torch.dtype | None = None
    parameters: torch.dtype | None = None
    gradients: torch.dtype | None = None
    master: torch.dtype | None = None
    loss_scale: LossScaling | None = None

    def __post_init__(self) -> None:
        given = {name: getattr(self, name) for name in DTYPE_FIELDS}
        problems = [
            f"{name} is {value!r}, expected one of torch.{', torch.'.join(NAMES.values())}"
            for name, value in given.items()
            if value is not None and value not in NAMES
        ]
        if self.loss_scale not in (None, "dynamic"):
            problems.append(f'loss_scale is {self.loss_scale!r}, expected "dynamic" or None')
        if not problems:
            problems += self._contradictions()
        if problems:
            raise UsageError("cannot train in this precision", because=problems)

    def _contradictions(self) -> list[str]:
        problems = []
        if self.master is not None and self.master.itemsize < ACCUMULATION.itemsize:
            problems.append(f"master copies in {NAMES[self.master]} keep no more than 16-bit parameters do")
        for name in ("parameters", "compute"):
            value = getattr(self, name)
            if self.master is not None and value is not None and value.itemsize > self.master.itemsize:
                problems.append(f"master={NAMES[self.master]} is narrower than {name}={NAMES[value]}")
        if self.gradients == torch.float16 and self.loss_scale is None:
            problems.append('gradients summed in float16 need loss_scale="dynamic"')
        return problems

    def of(self, own: torch.dtype, *, trains: bool = True, keeps_dtype: bool = False) -> ParameterPrecision:
        """Return the types of a parameter that the model has in ``own``.

        With ``keeps_dtype`` it is not cast for compute or storage (batch norms).
        """
        if not own.is_floating_point:
            return ParameterPrecision.plain(own)
        stored = own if keeps_dtype or self.parameters is None else self.parameters
        leaf = stored if keeps_dtype or self.compute is None else self.compute
        mastered = trains and self.master is not None and self.master.itemsize > stored.itemsize
        owner = self.master if mastered and self.master is not None else stored
        gradient = self.gradients
        if gradient is None:
            gradient = leaf if leaf.itemsize >= ACCUMULATION.itemsize else ACCUMULATION
        return ParameterPrecision(leaf, stored, owner, gradient)

    @property
    def casts_to(self) -> torch.dtype | None:
        """The type that the floating-point inputs of ``forward`` are cast to: the one parameters were given, if any."""
        return self.compute if self.compute is not None else self.parameters

    def fields(self) -> dict[str, str]:
        """Return the fields that are fixed, as words: {"compute": "bfloat16"}."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: NAMES.get(value, value) for name, value in given.items() if value is not None}

    @classmethod
    def from_fields(cls, given: Mapping[str, str]) -> Precision:
        """Read what ``fields`` returns; short words such as bf16 are understood too. Raises UsageError."""
        problems = [
            f"{name!r} is not one of {', '.join((*DTYPE_FIELDS, 'loss_scale'))}"
            for name in given
            if name not in (*DTYPE_FIELDS, "loss_scale")
        ]
        problems += [
            f"{name}={given[name]!r} is not one of {', '.join(WORDS)}"
            for name in DTYPE_FIELDS
            if name in given and given[name] not in WORDS
        ]
        if given.get("loss_scale", "dynamic") != "dynamic":
            problems.append(f"loss_scale={given['loss_scale']!r} is not dynamic")
        if problems:
            raise UsageError("cannot read the precision", because=problems)
        dtypes = {name: WORDS[given[name]] for name in DTYPE_FIELDS if name in given}
        return cls(**dtypes, loss_scale="dynamic" if "loss_scale" in given else None)

    @classmethod
    def checked(cls, given: object) -> Precision:
        """Return ``given`` itself; the model's own types for None. Raises UsageError for anything else."""
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        raise UsageError(
            f"the precision is a {type(given).__name__}",
            because=["a partitioner.Precision is expected"],
            suggestions=["precision=Precision(compute=torch.bfloat16)"],
        )

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.fields().items()) or "the model's own"
