"""The tools that are only written for: vLLM, llama.cpp, SLURM and torchrun."""

from __future__ import annotations

import pytest

from cost_models.errors import UsageError
from partitioner.formats import llama_cpp, rankfile, vllm
from partitioner.formats.tools import TOOLS, tool_named
from partitioner.plan import Plan
from tests.support.formatted_plans import llama_plan_of, plan_of


def _pipeline() -> Plan:
    return llama_plan_of(
        "pipeline=4 data=1 microbatch=1 recompute=none borders=model.layers.1,model.layers.2,model.layers.3",
        "1f1b",
    )


def test_vllm() -> None:
    assert str(vllm.write(_pipeline())) == (
        "VLLM_PP_LAYER_PARTITION=1,1,1,1 vllm serve MODEL --tensor-parallel-size 1 --pipeline-parallel-size 4"
    )
    tensor = vllm.write(llama_plan_of("tensor=2 data=2 zero=1 microbatch=2 recompute=none"))
    assert str(tensor) == (
        "vllm serve MODEL --tensor-parallel-size 2 --pipeline-parallel-size 1 --data-parallel-size 2"
    )
    with pytest.raises(UsageError, match="each replica holds its parameters"):
        vllm.write(plan_of("data=8 zero=3 microbatch=2 recompute=none"))


def test_llama_cpp() -> None:
    assert str(llama_cpp.write(_pipeline())) == "llama-server -m MODEL.gguf -ngl 99 -sm layer -ts 1,1,1,1"
    with pytest.raises(UsageError, match="one way to divide weights"):
        llama_cpp.write(llama_plan_of("tensor=2 data=2 zero=1 microbatch=2 recompute=none"))


def test_rankfile() -> None:
    written = rankfile.write(_pipeline())
    assert len(written.files["hostfile"].splitlines()) == 4
    assert len(set(written.files["hostfile"].splitlines())) == 1
    assert "--nodes 1 --ntasks 4 --distribution=arbitrary" in written.files["srun.sh"]
    assert "torchrun --standalone --nproc-per-node 4 train.py" in written.files["torchrun.sh"]


def test_every_tool_is_known_by_its_module() -> None:
    assert {tool_named(name).title for name in TOOLS} >= {"vLLM", "llama.cpp", "SLURM and torchrun"}
