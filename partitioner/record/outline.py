"""The model as a plan remembers it, for pictures: modules, ops, what they read, and what each op takes.

    modules   "", layers.0.mlp, …            kinds   what ops are alike in: op, shape, work
    ops       names, and by number the kind, module and source line of each, and what it reads

Numbers are written in one line of text, so that a model of 10,000 ops takes some 500 KB. Rebuilding and running a plan
needs none of this: programs follow from stages and values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from partitioner.record.file import Amount, Natural, Record


def _read_numbers(value: object) -> object:
    """Read "0 1 1 -2" as numbers; anything else as it is."""
    if not isinstance(value, str):
        return value
    words = value.split()
    if not all(re.fullmatch(r"-?[0-9]{1,9}", word) for word in words):
        raise ValueError("expected whole numbers with spaces between them")
    return tuple(map(int, words))


def _write_numbers(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))


NumbersText = Annotated[
    tuple[int, ...],
    BeforeValidator(_read_numbers),
    PlainSerializer(_write_numbers, when_used="json"),
    WithJsonSchema({"type": "string", "pattern": "^[-0-9 ]*$"}),
]
"""Whole numbers; in JSON a text of them."""


class OutlineKind(Record):
    """The traits that ops share. Amounts are of a micro-batch and of the whole op, whatever devices share it."""

    op: str = Field(description="such as aten.linear.default")
    shape: tuple[Natural, ...] = Field(description="of its first result")
    dtype: str
    forward_flops: Amount
    backward_flops: Amount
    output_bytes: Natural
    saved_bytes: Natural = Field(description="that autograd keeps on its account until backward")
    forward_seconds: Amount = Field(description="alone on the cluster's first device")
    backward_seconds: Amount


class OutlineInput(Record):
    """A tensor that ops read and none makes."""

    kind: Literal["parameter", "buffer", "constant", "batch", "value"]
    name: str
    shape: tuple[Natural, ...]
    size_bytes: Natural


class ModelOutline(Record):
    """The model's modules and ops in the order of its code."""

    modules: tuple[str, ...] = Field(
        description='paths; behind those that have ops the modules around them; "" is the model itself'
    )
    classes: tuple[str, ...] = Field(default=(), description="names; earlier plans have none")
    class_of: NumbersText = Field(default=(), description="per module, into classes; -1: not known")
    sources: tuple[str, ...] = Field(description="file:line of the model's code")
    kinds: tuple[OutlineKind, ...]
    inputs: tuple[OutlineInput, ...]
    names: tuple[str, ...] = Field(description="of the ops")
    kind_of: NumbersText = Field(description="per op, into kinds")
    module_of: NumbersText = Field(description="per op, into modules")
    source_of: NumbersText = Field(description="per op, into sources")
    read_counts: NumbersText = Field(description="per op, how many of reads are its own")
    reads: NumbersText = Field(
        description="what each op reads, one op after the other, its tensors in the order of its arguments: n is op n, "
        "-1 - n is inputs[n]"
    )

    def class_names(self) -> dict[str, str]:
        """Return the name of each module's class, as far as it is known, by path."""
        numbered = zip(self.modules, self.class_of, strict=False)  # earlier plans have none
        return {path: self.classes[number] for path, number in numbered if number >= 0}

    def reads_of(self) -> list[tuple[int, ...]]:
        """Return what each op reads: n is op n, -1 - n is ``inputs[n]``."""
        reads, at = [], 0
        for count in self.read_counts:
            reads.append(self.reads[at : at + count])
            at += count
        return reads


MOST_LEVELS = 100
"""The most modules inside of each other, far more than models have: pictures draw them one in the other."""


def contradictions(outline: ModelOutline, planned: Sequence[str]) -> Iterator[str]:
    """Yield what does not fit together in an outline. ``planned``: the ops that the plan's stages run."""
    count = len(outline.names)
    for name, limit in (("kind_of", "kinds"), ("module_of", "modules"), ("source_of", "sources")):
        numbers = getattr(outline, name)
        if len(numbers) != count:
            yield f"outline.{name}: {len(numbers)} numbers for {count} ops"
        if any(not 0 <= number < len(getattr(outline, limit)) for number in numbers):
            yield f"outline.{name}: a number is none of outline.{limit}"
    if outline.class_of and len(outline.class_of) != len(outline.modules):
        yield f"outline.class_of: {len(outline.class_of)} numbers for {len(outline.modules)} modules"
    if any(not -1 <= number < len(outline.classes) for number in outline.class_of):
        yield "outline.class_of: a number is none of outline.classes"
    if len(set(outline.names)) != count:
        yield "outline.names: an op is there twice"
    if any(module.count(".") > MOST_LEVELS for module in outline.modules):
        yield f"outline.modules: a path of more than {MOST_LEVELS} modules inside of each other"
    counts = outline.read_counts
    if len(counts) != count or any(number < 0 for number in counts) or sum(counts) != len(outline.reads):
        yield "outline.read_counts: does not divide outline.reads among the ops"
    elif any(
        not -len(outline.inputs) <= read < op for op, own in enumerate(outline.reads_of()) for read in own
    ):
        yield "outline.reads: an op reads what is no input and no earlier op"
    unknown = sorted(set(planned).difference(outline.names))
    if unknown:
        yield f"outline.names: {', '.join(unknown[:3])} of the stages is not there"
