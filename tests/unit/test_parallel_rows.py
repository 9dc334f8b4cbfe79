"""Published parallel runs as plans: what a fix line says of a row, and which none does (``benchmarks.parallel_rows``)."""

from __future__ import annotations

import pytest
import torch

from benchmarks.parallel_models import Decoder, decoder
from benchmarks.parallel_rows import NotExpressibleError, as_run, kinds_of, nanotron_borders

ROW = {
    "id": "nt", "kind": "TP+PP+SP+ZERO1+TIME+MEM", "source_id": "nanotron-grid", "layers": "16", "hidden": "2048",
    "heads": "32", "kv_heads": "32", "ffn": "8192", "vocab": "131072", "tied": "1", "gpu": "h100_80gb", "gpus": "64",
    "gpus_per_node": "8", "sequence": "4096", "global_batch": "256", "micro_batch": "2", "tp": "4", "sp": "1", "pp": "4",
    "vpp": "1", "sharding": "zero1",
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
        ({"gpu": "gb200"}, "no preset of gb200"),
        ({"layers": ""}, "not published: layers"),
        ({"pp": "16"}, "empty stage"),
    ],
)
def test_what_no_fix_line_says_is_named(change: dict[str, str], reason: str):
    with pytest.raises(NotExpressibleError, match=reason):
        as_run({**ROW, **change})


def test_nanotron_ends_a_stage_with_the_block_that_passes_its_share():
    """A head of four layers' multiplications: of twenty, each of four stages has five; the first ends with the sixth."""
    shape = as_run(ROW).shape
    assert nanotron_borders(shape, 4) == ["blocks.6", "blocks.11", "norm"]
    assert nanotron_borders(shape, 2) == ["blocks.11"]


@pytest.mark.parametrize("family", ["llama", "gpt"])
def test_a_decoder_is_of_its_shape(family: str):
    shape = Decoder(family, 2, 8, 2, 2, 16, 32, 4, tied=False, attention="softmax", dtype=torch.float32)  # type: ignore[arg-type]
    made = decoder(shape)
    tokens = made.example_inputs["tokens"].to("meta")
    assert made.model(tokens, tokens).shape == ()
    assert len(made.model.blocks) == 2
