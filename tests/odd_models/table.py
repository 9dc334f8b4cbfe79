"""All cases, by chapter and name."""

from __future__ import annotations

from tests.odd_models import behaviour, data_and_state, functions, layers, losses, sequences
from tests.odd_models.case import Case

CHAPTERS: dict[str, dict[str, Case]] = {
    chapter: cases
    for module in (layers, losses, sequences, functions, behaviour, data_and_state)
    for chapter, cases in module.CHAPTERS.items()
}

CASES: dict[str, Case] = {
    f"{chapter}: {name}": case for chapter, cases in CHAPTERS.items() for name, case in cases.items()
}
