"""Ops that a user defined reach local workers, whose processes have not run the user's code."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import fx

from partitioner.models.load import load_workload
from runtime.ranks.launch import spawn_local
from runtime.segment.portable import PackedNode, pack, unpack

MODEL = """
import torch
from partitioner import Workload

@torch.library.custom_op("portable_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2

def factory() -> Workload:
    return Workload(torch.nn.Identity(), torch.ones(2), None)
"""


def run_packed(nodes: tuple[PackedNode, ...]) -> float:
    return float(unpack(nodes)(torch.tensor(3.0)))


def test_an_op_of_a_users_file_is_there_in_another_process(tmp_path: Path) -> None:
    file = tmp_path / "ops_of_a_user.py"
    file.write_text(MODEL)
    load_workload(f"{file}:factory")
    graph = fx.Graph()
    graph.output(graph.call_function(torch.ops.portable_test.twice.default, (graph.placeholder("x"),)))
    assert spawn_local(1, run_packed, pack(fx.GraphModule(torch.nn.Module(), graph))) == [6.0]
