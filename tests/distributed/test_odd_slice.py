"""A few of the odd models on every run of the tests; ``make odd-models`` trains all of them."""

from __future__ import annotations

import torch

from runtime.ranks.launch import WorkerPool
from tests.odd_models.run import run
from tests.odd_models.table import CASES

SLICE = {
    "losses: CosineEmbeddingLoss": ("data2",),
    "normalization: InstanceNorm2d with statistics": ("zero3",),
    "embedding: EmbeddingBag, sum, offsets": ("data2",),
    "embedding: EmbeddingBag, sum, last offset": ("zero3",),
    "complex and sparse: complex parameters": ("layer2",),
    "parametrizations: an empty parameter": ("zero3",),
}
"""Cases that were wrong or refused once, each in the way in which it was."""


def test_odd_models_train_as_a_plain_loop_trains_them() -> None:
    before = torch.get_default_dtype()
    try:
        with WorkerPool(2) as pool:  # of its own: the models change the default type of whole processes
            results = [result for name, ways in SLICE.items() for result in run([name], ways, pool)]
    finally:
        torch.set_default_dtype(before)
    assert [(r.case, r.way, r.outcome, r.text) for r in results if r.outcome != "equal"] == []
    assert len(results) == sum(map(len, SLICE.values()))


def test_the_table_is_large_and_has_every_layer_and_loss() -> None:
    assert len(CASES) >= 400
    text = " ".join(CASES)
    layers = [
        name for name in dir(torch.nn) if name[0].isupper() and isinstance(getattr(torch.nn, name), type)
    ]
    named = {name for name in layers if name in text}
    assert {name for name in layers if name.endswith("Loss")} - named <= {"NLLLoss2d"}
    assert len(named) > 100, sorted(set(layers) - named)
