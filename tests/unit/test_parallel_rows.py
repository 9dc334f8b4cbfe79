"""Published parallel runs as plans: what a fix line says of a row, and which none does (``benchmarks.parallel_rows``)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.parallel_models import Decoder, decoder
from benchmarks.parallel_rows import GIB, NotExpressibleError, kinds_of
from benchmarks.parallel_runs import Compared, Predicted
from benchmarks.parallel_sources import as_run, full_borders, nanotron_borders

ROW = {
    "id": "nt", "kind": "TP+PP+SP+ZERO1+TIME+MEM", "source_id": "nanotron-grid", "layers": "16", "hidden": "2048",
    "heads": "32", "kv_heads": "32", "ffn": "8192", "vocab": "131072", "tied": "1", "gpu": "h100_80gb", "gpus": "64",
    "gpus_per_node": "8", "sequence": "4096", "global_batch": "256", "micro_batch": "2", "tp": "4", "sp": "1", "pp": "4",
    "vpp": "1", "sharding": "zero1",
}  # fmt: skip
BLOOM = {
    **ROW, "source_id": "bigscience", "layers": "70", "hidden": "14336", "heads": "112", "kv_heads": "112", "ffn": "57344",
    "vocab": "250880", "gpu": "a100_80gb", "gpus": "384", "sp": "0", "pp": "12", "trust": "B", "precision": "fp16",
    "optimizer": "fused Adam", "notes": "embeddings balanced as pipeline slots", "peak_memory_gib": "59",
    "sequence": "2048",
}  # fmt: skip
MPT = {
    **ROW, "source_id": "mosaic", "model": "mpt-70b", "kind": "AC+FSDP+TIME", "tp": "1", "pp": "1",
    "sharding": "FSDP zero3", "recompute": "full", "precision": "bf16 (pure)",
}  # fmt: skip
INTERNLM = {
    **ROW, "source_id": "internlm", "gpu": "a100_80gb", "tp": "2", "sp": "0", "pp": "1", "dp": "32", "shard_degree": "32",
    "recompute": "none",
}  # fmt: skip
GOLDEN = {
    **ROW, "source_id": "mlm-golden", "vocab": "131073", "gpus": "8", "pp": "1", "sp": "0", "attention": "unfused",
    "fused": "transformer_engine", "precision": "bf16", "recompute": "full uniform",
}  # fmt: skip


def test_a_row_is_one_fix_line_with_its_sources_stages():
    run = as_run(ROW)
    assert run.fix == (
        "pipeline=4 data=4 zero=1 sequence=4 microbatch=2 recompute=gathers borders=blocks.6,blocks.11,norm"
    )
    assert (run.cluster().world_size, run.batch, run.place, run.shape.tied) == (64, 256, "first", False)
    assert kinds_of(ROW) == ["TPxPP", "ZeRO"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": "TP+MOE+TIME"}, "experts"),
        ({"source_id": "elsewhere"}, "nobody has read"),
        ({"gpu": "b900"}, "no preset of b900"),
        ({"layers": ""}, "not published: layers"),
        ({"pp": "16"}, "empty stage"),
        ({"heads": "24"}, "do not divide"),
    ],
)
def test_what_no_fix_line_says_is_named(change: dict[str, str], reason: str):
    with pytest.raises(NotExpressibleError, match=reason):
        as_run({**ROW, **change})


def test_a_distillation_is_not_compared_as_its_student_alone():
    with pytest.raises(NotExpressibleError, match="columns do not tell"):
        as_run({**GOLDEN, "id": "mlm-gb200-gpt3_mcore_te_tp2_pp1_modelopt_distill_resume-dev"})


def test_each_source_runs_by_its_conventions():
    mpt, internlm, golden = as_run(MPT), as_run(INTERNLM), as_run(GOLDEN)
    assert mpt.fix == "pipeline=1 data=64 zero=3 microbatch=2 recompute=full"
    assert (mpt.shape.layers, mpt.precision.gradients, mpt.stack) == (80, torch.bfloat16, "2023")
    assert internlm.fix == "pipeline=1 data=32 zero=1 tensor=2 microbatch=2 recompute=none"
    assert (golden.shape.vocabulary, golden.shape.attention, golden.place) == (131_584, "softmax", "last")
    with pytest.raises(NotExpressibleError, match="among some"):
        as_run({**INTERNLM, "shard_degree": "8"})


def test_deepspeed_fills_stages_from_the_first_and_may_count_embeddings_as_layers():
    assert full_borders(78, 12, ends=False)[-1] == "blocks.77"  # 7, 7, ..., 1
    assert full_borders(70, 12, ends=True) == [f"blocks.{5 + 6 * i}" for i in range(11)]  # 5, 6, ..., 5


def test_each_published_number_is_compared_with_what_it_counts():
    run, part = as_run(BLOOM), (0.2 * GIB, 0.0, 0.2 * GIB)
    made = Predicted("bs", "", peaks=(57 * GIB, GIB, 57 * GIB), allocators=part, communicators=part)
    assert Compared(GOLDEN, as_run(GOLDEN), made).peak_bytes == GIB
    reserved = as_run(ROW)
    assert Compared(ROW, reserved, made).peak_bytes == pytest.approx(57.2 * GIB + reserved.held_bytes)
    outputs = 12 * 2 * 2048 * 14336  # of as many micro-batches as stages
    assert run.held_bytes == 2 * (outputs + 500_000_000)
    assert Compared(BLOOM, run, made).memory_error == pytest.approx(run.held_bytes / (59 * GIB), abs=1e-6)
    in_fp32 = as_run({**BLOOM, "precision": "bf16, fp32 grad accumulation"})
    assert in_fp32.held_bytes == 2 * (outputs + (12 * 5 * 14336 + 250880) * 14336 // 4)


def test_gradients_have_a_buffer_from_the_start_in_steps_of_one_micro_batch():
    one = {**ROW, "gpus": "64", "tp": "1", "pp": "2", "micro_batch": "8"}  # 32 replicas
    layers = 11 * (4 * 2048**2 + 3 * 2048 * 8192)  # the first stage's
    assert as_run(one).held_bytes == 4 * (layers + 131072 * 2048)
    assert as_run({**one, "micro_batch": "4"}).held_bytes == 0


def test_what_is_scattered_is_not_free_at_once():
    whole = 2 * 4096 * 2048 * 2  # of a micro-batch, in 16 bits
    assert as_run(ROW).held_bytes == 2 * 6 * whole
    assert as_run({**ROW, "tp": "1"}).held_bytes == 0


def test_kernels_wait_for_their_launches_where_those_block():
    run = as_run(BLOOM)
    free, blocked = (made.cluster().devices[0] for made in (replace(run, launches_block=False), run))
    waits = blocked.kernel_overhead_seconds - free.kernel_overhead_seconds
    assert waits == pytest.approx(free.launch_overhead_seconds)
    assert free.launch_overhead_seconds > 0


def test_nanotron_ends_a_stage_with_the_block_that_passes_its_share():
    """A head of four layers' multiplications: of twenty, each of four stages has five; the first ends with the sixth."""
    shape = as_run(ROW).shape
    assert nanotron_borders(shape, 4) == ["blocks.6", "blocks.11", "norm"]
    assert nanotron_borders(shape, 2) == ["blocks.11"]


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_a_decoder_is_of_its_shape(family: str):
    shape = Decoder(
        family,  # type: ignore[arg-type]
        2, 8, 2, 2, 16, 32, 4, tied=False, attention="softmax", dtype=torch.float32, dropout=0.1,
    )  # fmt: skip
    made = decoder(shape)
    tokens = made.example_inputs["tokens"].to("meta")
    assert made.model(tokens, tokens).shape == ()
    assert len(made.model.blocks) == 2
