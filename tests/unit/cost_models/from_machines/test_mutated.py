"""Files with random faults: each is read or refused in one error that names the file; nothing crashes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from cost_models.errors import ClusterError
from cost_models.from_machines.combine import Chosen, Readings, found_cluster
from cost_models.from_machines.gpu_table import read_gpus
from cost_models.from_machines.hardware_files import read_hardware
from cost_models.from_machines.jobs import read_job
from cost_models.from_machines.nccl_tests import read_nccl_tests
from cost_models.from_machines.nccl_topology import read_nccl_topology
from cost_models.from_machines.seen import Gpu, ToolText
from cost_models.from_machines.switches import read_switches
from cost_models.from_machines.topo_matrix import read_topo
from tests.unit.cost_models.from_machines.forms import GPUS, TOPO
from tests.unit.cost_models.from_machines.hardware_forms import FILES as HARDWARE
from tests.unit.cost_models.from_machines.job_forms import JOBS, TOPOLOGIES
from tests.unit.cost_models.from_machines.rate_forms import TESTS
from tests.unit.cost_models.from_machines.xml_forms import NCCL

MUTANTS = 100
WORDS = [
    "",
    "X",
    "N/A",
    "-1",
    "0",
    "99999999999",
    "NV0",
    "GPU0",
    "[",
    "%",
    "\x00",
    "\t",
    "ü",
    "1e9",
    "=",
    '"',
    "<",
    "]]>",
]


def mutant(text: str, seed: int) -> str:
    """Make one to three faults: a line lost, doubled or moved, a word changed, the end cut off."""
    draw = random.Random(seed)
    for _ in range(draw.randint(1, 3)):
        lines = text.split("\n")
        at = draw.randrange(len(lines))
        match draw.randrange(5):
            case 0:
                del lines[at]
            case 1:
                lines.insert(draw.randrange(len(lines)), lines[at])
            case 2:
                words = lines[at].split(" ") if " " in lines[at] else lines[at].split("\t")
                words[draw.randrange(len(words))] = draw.choice(WORDS)
                lines[at] = (" " if " " in lines[at] else "\t").join(words)
            case 3:
                cut = draw.randrange(len(lines[at]) + 1)
                lines[at] = lines[at][:cut] + draw.choice(WORDS) + lines[at][cut:]
            case _:
                lines = "\n".join(lines)[: draw.randrange(len(text) + 1)].split("\n")
        text = "\n".join(lines)
    return text


def of_topo(text: str) -> None:
    found_cluster(Readings(read_topo(ToolText.of("the file", text))), Chosen("H100-80GB"))


def of_gpus(text: str) -> None:
    found_cluster(Readings(gpus=read_gpus(ToolText.of("the file", text))), Chosen())


def of_nccl(text: str) -> None:
    found_cluster(Readings(nccl=read_nccl_topology(ToolText.of("the file", text))), Chosen())


def of_job(text: str) -> None:
    found_cluster(Readings(job=read_job(ToolText.of("the file", text))), Chosen("T4", "Ethernet-25G"))


def of_switches(text: str) -> None:
    switches = read_switches(ToolText.of("the file", text))
    found_cluster(
        Readings(gpus=(Gpu("NVIDIA T4", "gpus.csv, line 1"),), switches=switches),
        Chosen(network="Ethernet-25G"),
    )


def of_tests(text: str) -> None:
    rates = read_nccl_tests(ToolText.of("the file", text))
    found_cluster(Readings(rates=rates), Chosen("H100-80GB", "InfiniBand-NDR", nodes=2))


def of_hardware(text: str) -> None:
    file = Path("the file of h100_sxm.yaml")
    file.write_text(text)
    found_cluster(Readings(hardware=read_hardware(file)), Chosen("H100-80GB"))


READERS: dict[str, tuple[Callable[[str], None], list[str]]] = {
    "topo": (of_topo, [text for text, _, _ in TOPO.values()]),
    "nccl": (of_nccl, [text for text, *_ in NCCL.values()]),
    "job": (of_job, [text for text, _, _, counts in JOBS.values() if counts]),
    "switches": (of_switches, [text for text, _ in TOPOLOGIES.values()]),
    "tests": (of_tests, [text for text, _ in TESTS.values()]),
    "hardware": (of_hardware, [text for text, *_ in HARDWARE.values()]),
    "gpus": (of_gpus, [text for text, _ in GPUS.values()]),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of readers that need a file."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", READERS)
@pytest.mark.usefixtures("folder")
def test_mutants_are_read_or_refused(name: str) -> None:
    read, forms = READERS[name]
    refused = [
        error for seed in range(MUTANTS) if (error := refusal(read, mutant(forms[seed % len(forms)], seed)))
    ]
    assert 0 < len(refused) < MUTANTS
    for error in refused:
        assert "the file" in f"{error.what} {error.because}", error.render()
        assert error.suggestions, error.render()


def refusal(read: Callable[[str], None], text: str) -> ClusterError | None:
    """Return the error with which a text is refused; None if it is read."""
    try:
        read(text)
    except ClusterError as error:
        return error
    return None
