"""Options and output that the commands share."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from cost_models.errors import UsageError

SECONDS_BEFORE_PROGRESS = 1.0


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Say on stderr what is being done, if it takes more than a second, and how long it took."""
    started = time.monotonic()
    timer = threading.Timer(SECONDS_BEFORE_PROGRESS, lambda: print(f"{what} …", file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    seconds = time.monotonic() - started
    if seconds > SECONDS_BEFORE_PROGRESS:
        print(f"{what}: {seconds:.1f} s", file=sys.stderr, flush=True)


def emit(text: str, data: Mapping[str, Any], as_json: bool) -> None:
    """Print the result: one JSON object and nothing else with ``--json``, the text otherwise."""
    print(json.dumps(data, indent=1) if as_json else text)


def settings(pairs: Sequence[str], flag: str = "--set") -> dict[str, str]:
    """``["size=tiny"]`` -> ``{"size": "tiny"}``; collects every malformed pair before raising."""
    problems = [pair for pair in pairs if "=" not in pair or not pair.split("=", 1)[0]]
    if problems:
        raise UsageError(
            f"cannot read {flag}",
            because=[f"{pair!r} is not key=value" for pair in problems],
            suggestions=[f"write {flag} key=value, once per key"],
        )
    return dict(pair.split("=", 1) for pair in pairs)


def pins(pairs: Sequence[str]) -> dict[str, int]:
    """``["transformer.h.0.*=1"]`` -> ``{"transformer.h.0.*": 1}``."""
    found = settings(pairs, "--pin")
    problems = [
        f"{glob}={stage}: the stage is not a number" for glob, stage in found.items() if not stage.isdigit()
    ]
    if problems:
        raise UsageError(
            "cannot read --pin", because=problems, suggestions=["write --pin 'module.glob.*=STAGE'"]
        )
    return {glob: int(stage) for glob, stage in found.items()}


def microbatch_count(text: str) -> int | str:
    """ "auto" or a positive number."""
    if text == "auto":
        return "auto"
    if not text.isdigit() or int(text) < 1:
        raise UsageError(
            "cannot read --microbatches", because=[f"{text!r} is neither auto nor a number from 1 up"]
        )
    return int(text)
