"""Plans that tests change by hand: their certificates say nothing of terms, which would not add up any more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from partitioner import Plan


def edited(plan: Plan, **fields: Any) -> Plan:
    """Return the plan with other ``fields``."""
    certificate = replace(plan.certificate, terms=None)
    return plan.model_copy(update={"certificate": certificate, **fields})
