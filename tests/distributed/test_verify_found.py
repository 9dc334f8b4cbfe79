"""Arrangements that the hybrid search compares, on real processes: a slice of ``benchmarks.found_matrix``."""

from __future__ import annotations

import pytest

from benchmarks.found_matrix import cases_of
from benchmarks.hybrid_matrix import verify_from_file
from runtime.ranks.launch import WorkerPool
from tests.support.matrix import thinned
from tests.support.traced_models import loaded

SHOWN = [
    ("t5", "2 groups, 2 replicas, interleaved × 2, 4 × 6 samples: half computed again"),
    # both groups read the same leaf, one of them its own samples
    (
        "lstm_seq2seq",
        "2 + 2 (0, 1) first, 1 group, 2 replicas + 1 group, tensor 2, 1f1b, 4 × 6 samples: half computed again",
    ),
]
OTHERS = [
    ("gpt2", "2 groups, tensor 2, interleaved × 2, 4 × 6 samples: dear memory"),
    ("unet", "1 group, 2 replicas, tensor 2, 1f1b, 4 × 6 samples: cheap memory"),
    ("mixtral", "2 groups, 2 replicas, interleaved × 2, 4 × 6 samples: cheap memory"),
    ("resnet50", "2 groups, tensor 2, 1f1b, 4 × 6 samples: cheap memory"),
    ("llama-8b", "4 groups, 1f1b, 4 × 6 samples: computed again"),
    ("vit", "1 group, tensor 4, 1f1b, 4 × 6 samples: dear memory"),
    (
        "bert",
        "1 + 3 (1, 2, 3) first, 1 group, tensor 3 + 1 group, interleaved × 2, 4 × 6 samples: dear memory",
    ),
    ("gpt2", "2 + 2 (0, 1, 2, 3) first, 1 group, 2 replicas, tensor 2, 1f1b, 4 × 6 samples: dear memory"),
    ("gpt2", "2 + 1 + 1 found, short of memory"),
]


@pytest.mark.parametrize(("model", "case"), thinned([*SHOWN, *OTHERS], SHOWN))
def test_it_computes_what_the_model_computes(model: str, case: str, pool: WorkerPool) -> None:
    workload, graph = loaded(model)
    report = verify_from_file(dict(cases_of(graph))[case](), workload, graph, pool)
    report.raise_if_different()
    assert report.compared["gradient"] > 10
