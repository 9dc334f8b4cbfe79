"""`nvidia-smi topo -m`: every layout of columns is read; what is no matrix is refused with its line."""

from __future__ import annotations

import pytest

from cost_models.errors import ClusterError
from cost_models.from_machines.seen import ToolText
from cost_models.from_machines.topo_matrix import read_topo
from tests.unit.cost_models.from_machines.forms import TOPO, full, matrix


@pytest.mark.parametrize("name", TOPO)
def test_a_matrix_is_read(name: str) -> None:
    text, _, _ = TOPO[name]
    machine = read_topo(ToolText.of("topo.txt", text))
    assert len(machine.wires) == machine.count * (machine.count - 1) // 2


def test_cards_are_near_the_gpus_that_reach_them_without_the_cpu() -> None:
    cards = read_topo(ToolText.of("topo.txt", TOPO["h100 and cards"][0])).cards
    assert [(card.name, card.near, card.source) for card in cards][2:] == [
        ("mlx5_2", (2,), "topo.txt, line 8"),
        ("mlx5_bond_0", (3,), "topo.txt, line 9"),
    ]
    (card,) = read_topo(ToolText.of("topo.txt", TOPO["v100 cube"][0])).cards
    assert (card.name, card.near) == ("mlx5_0", ())


@pytest.mark.parametrize(
    ("text", "where", "cause"),
    [
        ("", "cannot read topo.txt", "no line begins with GPU0"),
        (
            "Failed to initialize NVML: Driver/library version mismatch\n",
            "cannot read topo.txt",
            "no line begins with GPU0",
        ),
        (
            matrix(full("NV18", 2)).replace("NV18\t X ", "N/A\t X "),
            "line 3",
            "the way from GPU1 to GPU0: expected X, NV#",
        ),
        (
            matrix(full("NV18", 2)).replace("GPU1\tNV18\t X ", "GPU1\tNV18\tNV18"),
            "line 3",
            "expected X, got 'NV18'",
        ),
        (
            matrix(["X NV2 SYS", "NV1 X SYS", "SYS SYS X"]),
            "line 3",
            "GPU1 reaches GPU0 by NV1, but GPU0 reaches GPU1 by NV2 (line 2)",
        ),
        (matrix(full("SYS", 2)).replace("GPU1\tSYS", "GPU5\tSYS"), "line 3", "GPU5 has no column"),
        (matrix(full("SYS", 2)).partition("GPU1\tSYS")[0], "line 1", "GPU1 has a column but no row"),
        (
            matrix(full("SYS", 3)).replace("GPU2\tSYS\tSYS\t X \t0-47\t0\tN/A", "GPU2\tSYS"),
            "line 4",
            "GPU2 has 1 cells, the header 3 columns",
        ),
        (matrix(full("SYS", 2)) * 2, "line 12", "a second matrix begins here"),
        (
            matrix(full("SYS", 2)).replace("GPU1\tCPU", "GPU0\tCPU"),
            "line 1",
            "the column GPU0 is there twice",
        ),
    ],
)
def test_what_is_no_matrix_is_refused_with_its_line(text: str, where: str, cause: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read_topo(ToolText.of("topo.txt", text))
    assert where in caught.value.what
    assert cause in caught.value.because[0]
    assert caught.value.suggestions
