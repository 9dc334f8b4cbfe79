"""``--batch-dims`` and ``--dynamic-dims``: what they say, and that the trace gets it."""

from __future__ import annotations

import json

import pytest

from cost_models.errors import UsageError
from partitioner.cli import run_command
from partitioner.commands.options import batch_dims, dynamic_dims


def test_dimensions_are_read() -> None:
    assert batch_dims(["mask=none", "ids=0", "x=-1"]) == {"mask": None, "ids": 0, "x": -1}
    assert dynamic_dims(["ids=1", "mask=1,2"]) == {"ids": [1], "mask": [1, 2]}
    assert batch_dims([]) is None
    assert dynamic_dims([]) is None


@pytest.mark.parametrize("text", ["ids", "ids=", "ids=one", "=1", "ids=1.5", "ids=1,"])
def test_what_is_no_dimension_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--batch-dims"):
        batch_dims([text])
    with pytest.raises(UsageError, match="--dynamic-dims"):
        dynamic_dims([text])
    assert batch_dims(["a=none"])
    with pytest.raises(UsageError, match="--dynamic-dims"):
        dynamic_dims(["a=none"])


def test_a_plan_is_made_with_them(capfd: pytest.CaptureFixture[str]) -> None:
    tiny = ["gpt2", "--set", "size=tiny", "--set", "layers=1", "--strategy", "layer"]
    command = ["plan", *tiny, "--cluster", "local:1", "--batch-size", "4", "--json"]
    fingerprints = []
    for more in ([], ["--dynamic-dims", "input_ids=1", "--dynamic-dims", "labels=1"]):
        assert run_command([*command, *more]) == 0
        fingerprints.append(json.loads(capfd.readouterr().out)["model"]["fingerprint"])
    assert fingerprints[0] != fingerprints[1]
