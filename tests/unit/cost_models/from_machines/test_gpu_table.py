"""The GPUs of a machine as nvidia-smi lists them, and the presets that they are."""

from __future__ import annotations

import pytest

from cost_models.errors import ClusterError
from cost_models.from_machines.device_names import device_of
from cost_models.from_machines.gpu_table import read_gpus
from cost_models.from_machines.seen import ToolText
from tests.unit.cost_models.from_machines.forms import GPUS


@pytest.mark.parametrize("name", GPUS)
def test_gpus_are_read_and_known(name: str) -> None:
    text, presets = GPUS[name]
    gpus = read_gpus(ToolText.of("gpus.csv", text))
    assert [device_of([gpu], None).value for gpu in gpus] == presets


def test_gpus_stand_in_the_order_of_their_index() -> None:
    gpus = read_gpus(ToolText.of("gpus.csv", GPUS["volta"][0]))
    assert [gpu.source for gpu in gpus] == ["gpus.csv, line 3", "gpus.csv, line 2"]


@pytest.mark.parametrize(
    ("text", "where", "cause"),
    [
        ("", "gpus.csv", "it is empty"),
        ("No devices were found\n", "line 1", "expected a line of column names with name among them"),
        ("0, NVIDIA H100 80GB HBM3, 81559 MiB\n", "line 1", "expected a line of column names"),
        ("index, name\n", "line 1", "no GPU is below"),
        ("index, name\n0, Tesla T4, 15360 MiB\n", "line 2", "expected 2 values, got 3"),
        ("index, name\n0, Tesla T4\n0, Tesla T4\n", "gpus.csv", "an index is there twice"),
        (
            "name, memory.total [MiB]\nTesla T4, lots\n",
            "line 2",
            "memory.total: expected a number, got 'lots'",
        ),
        ("index, name\n3, [Unknown Error]\n", "line 2", "GPU 3 has no name"),
        (
            "index, name, mig.mode.current\n2, NVIDIA A100-SXM4-40GB, Enabled\n",
            "line 2",
            "GPU 2 is cut into MIG instances",
        ),
        (
            "GPU 0: NVIDIA A30 (UUID: GPU-1)\n  MIG 1g.6gb      Device  0: (UUID: MIG-2)\n",
            "line 2",
            "GPU 0 is cut into MIG",
        ),
        ("GPU 0: NVIDIA A30 (UUID: GPU-1)\nwhat\n", "line 2", 'expected "GPU 0: NAME (UUID: …)"'),
    ],
)
def test_what_is_no_list_is_refused_with_its_line(text: str, where: str, cause: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read_gpus(ToolText.of("gpus.csv", text))
    assert where in caught.value.what
    assert cause in caught.value.because[0]
    assert caught.value.suggestions


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("name, memory.total [MiB]\nTesla V100-PCIE-32GB, 32510 MiB\n", '"V100-PCIE-16GB" has another size'),
        (
            "name\nNVIDIA H100 PCIe Turbo Max\nNVIDIA H200\n",
            "line 2 is of H100-PCIE-80GB, gpus.csv, line 3 of H200-141GB",
        ),
        (
            "name\nNVIDIA GeForce RTX 4050 Laptop GPU\n",
            'no preset is called "NVIDIA GeForce RTX 4050 Laptop GPU" (did you mean',
        ),
        ("name\nTesla V100-SXM2\n", 'can be "V100-16GB" or "V100-32GB"'),
    ],
)
def test_gpus_without_one_preset_are_refused(text: str, cause: str) -> None:
    with pytest.raises(ClusterError) as caught:
        device_of(read_gpus(ToolText.of("gpus.csv", text)), None)
    assert cause in caught.value.because[0]
    assert caught.value.suggestions


def test_a_device_is_chosen_by_hand_only_if_there_is_one() -> None:
    assert device_of((), "H100-80GB").value == "H100-80GB"
    with pytest.raises(ClusterError, match="there is no device preset"):
        device_of((), "H100-81GB")
