"""The planted-fault matrix (``make faults``): its table goes with the code, and a few of its faults are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.fault_plans import PLANS
from benchmarks.fault_table import FAULTS, Fault
from benchmarks.faults import copied_checkout, planted, run_probe
from tests.support.matrix import thinned

ROOT = Path(__file__).parents[2]
FEW = ("a message on a queue of its own", "a mean over ranks is not divided by them")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.wrong)
def test_a_fault_can_be_planted(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text()
    assert text.count(fault.old) == 1
    assert fault.old != fault.new
    assert set(fault.plans) <= set(PLANS)
    files = [part.partition("::")[0] for part in fault.test.split("|") if part.startswith("tests/")]
    assert files
    assert all((ROOT / file).exists() for file in files)


def test_there_are_faults_of_every_area() -> None:
    assert sum(not fault.needs_train for fault in FAULTS) >= 40
    areas = {fault.area for fault in FAULTS}
    assert areas >= {
        "rule", "reduction", "order", "offset", "weights", "recomputation", "tied", "norm", "optimizer shard",
        "halo", "loss weight", "micro-batch cut", "split neurons", "engine", "random",
    }  # fmt: skip


@pytest.mark.parametrize("wrong", thinned(FEW, FEW[1:]))
def test_a_planted_fault_is_found(wrong: str) -> None:
    (fault,) = (fault for fault in FAULTS if fault.wrong == wrong)
    with copied_checkout() as folder:
        assert run_probe(folder, fault.plans) == ("", "")
        with planted(fault, folder):
            by, text = run_probe(folder, fault.plans)
    assert by in ("checker", "verify"), text
