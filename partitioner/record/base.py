"""The base of every part of a plan: data that cannot change and admits nothing unknown, and the version that made it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, ClassVar

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    SerializerFunctionWrapHandler,
    WrapSerializer,
)

from passes.search.certificate import Certificate

Natural = NonNegativeInt
"""A number of things, a size in bytes, a rank or a stage."""
Amount = NonNegativeFloat
"""Seconds, or a cost."""


class Record(BaseModel):
    """A part of a plan."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, strict=True
    )


def _without_absent_terms(certificate: Certificate, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
    data: dict[str, Any] = handler(certificate)
    return data if certificate.terms is not None else {k: v for k, v in data.items() if k != "terms"}


CertificateField = Annotated[Certificate, WrapSerializer(_without_absent_terms)]
"""The search's certificate, in JSON without the terms of searches that have none."""


def package_version() -> str:
    """Return the installed version; "source" when run from a checkout that is not installed."""
    try:
        return version("partitioner")
    except PackageNotFoundError:
        return "source"
