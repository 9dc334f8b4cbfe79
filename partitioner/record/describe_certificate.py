"""The certificate of a search as a plan has it: stages that are alike and follow each other in one row."""

from __future__ import annotations

import itertools
from dataclasses import replace

from partitioner.record.base import (
    BoundTermRecord,
    CertificateRecord,
    PipelineTermsRecord,
    StageTermsRecord,
)
from passes.search.certificate import Certificate


def describe_certificate(found: Certificate) -> CertificateRecord:
    """Write a certificate down."""
    fields = {**vars(found), "terms": None}
    if found.terms is not None:
        rows = itertools.groupby(found.terms.stages, lambda s: replace(s, in_flight=0))
        fields["terms"] = PipelineTermsRecord(
            fill=found.terms.fill,
            microbatches=found.terms.microbatches,
            chunks=found.terms.chunks,
            stages=tuple(
                StageTermsRecord(
                    stages=len(list(alike)),
                    microbatch_seconds=row.microbatch_seconds,
                    once_seconds=row.once_seconds,
                    cut_seconds=row.cut_seconds,
                )
                for row, alike in rows
            ),
            in_flight=tuple(stage.in_flight for stage in found.terms.stages),
            options=tuple(BoundTermRecord(**vars(term)) for term in found.terms.options),
            in_turn=found.terms.in_turn,
        )
    return CertificateRecord(**fields)
