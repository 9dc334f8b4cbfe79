"""Exceptions that nobody foresaw: as they are where all versions were tried, else with what was not tried first."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import partitioner
from cost_models import tried
from cost_models.errors import InternalError
from partitioner.cli import run_command

NEW = "torch 2.16.0 was not tried; known good: 2.11 to 2.14"
WORDS = "'classmethod_descriptor' object has no attribute '__func__'"


def planned() -> partitioner.Plan:
    return partitioner.partition(
        torch.nn.Linear(4, 4),
        partitioner.ClusterSpec.local(2),
        example_inputs=torch.zeros(4, 4),
        loss_fn=lambda output, _: output.square().mean(),
        batch_size=4,
    )


@pytest.mark.parametrize("broken", ["partitioner.api.as_graph", "partitioner.import_module"])
def test_it_becomes_an_error_of_ours_beside_an_untried_version_only(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = planned if broken.endswith("as_graph") else lambda: partitioner.__getattr__("trace")
    partitioner.partition, partitioner.ClusterSpec  # noqa: B018 - imported while that works
    monkeypatch.setattr(broken, mock.Mock(side_effect=AttributeError(WORDS)))
    monkeypatch.setattr(tried, "_installed", {"torch": "2.14.1"}.get)
    with pytest.raises(AttributeError, match=WORDS):
        call()
    monkeypatch.setattr(tried, "_installed", {"torch": "2.16.0"}.get)
    with pytest.raises(InternalError) as caught:
        call()
    assert str(caught.value).splitlines()[:2] == [NEW, f"error[internal]: AttributeError: {WORDS}"]


def test_the_command_line_says_it_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tried, "_installed", {"torch": "2.16.0"}.get)
    monkeypatch.setattr("partitioner.cli.import_module", mock.Mock(side_effect=AttributeError(WORDS)))
    assert run_command(["show", "plan.json"]) == 1
    assert capsys.readouterr().err.splitlines()[:2] == [NEW, f"error[internal]: AttributeError: {WORDS}"]
