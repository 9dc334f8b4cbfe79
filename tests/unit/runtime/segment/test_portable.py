from __future__ import annotations

import operator
import pickle
import subprocess
import sys

import torch
from torch import fx, nn

from runtime.segment.code import SegmentCode, SegmentInput, SegmentOutput
from runtime.segment.portable import pack, unpack

aten = torch.ops.aten


def small_module() -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    size = graph.call_function(aten.sym_size.int, (x, 0), name="rows")
    halves = graph.call_function(aten.split.Tensor, (x, 2, 1), name="odd_name")
    first = graph.call_function(operator.getitem, (halves, 0))
    made = graph.call_function(
        aten.full.default, ([size, 2], 1.5), {"dtype": torch.float64, "device": torch.device("cpu")}
    )
    graph.output((graph.call_function(aten.add.Tensor, (first, made), {"alpha": 2}),))
    return fx.GraphModule(nn.Module(), graph)


def test_a_graph_survives_with_its_names() -> None:
    module = small_module()
    twin = unpack(pickle.loads(pickle.dumps(pack(module))))  # noqa: S301 - our own data
    assert [n.name for n in twin.graph.nodes] == [n.name for n in module.graph.nodes]
    x = torch.arange(8.0).reshape(2, 4)
    assert torch.equal(twin(x)[0], module(x)[0])


def test_segment_code_travels_between_processes() -> None:
    code = SegmentCode(
        3, small_module(), (SegmentInput("batch", "x"),), (SegmentOutput("loss", "loss"),), random=True
    )
    twin = pickle.loads(pickle.dumps(code))  # noqa: S301 - our own data
    assert (twin.index, twin.inputs, twin.outputs, twin.random) == (3, code.inputs, code.outputs, True)
    x = torch.ones(2, 4)
    assert torch.equal(twin.module(x)[0], code.module(x)[0])


def test_a_new_process_knows_the_ops_of_ours() -> None:
    code = "import runtime.segment.portable, torch; torch.ops.partitioner.embedding_bag.default"
    subprocess.run([sys.executable, "-c", code], check=True)
