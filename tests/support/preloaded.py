"""Imported once, by the process that the tests' workers are forked from: what nearly all of them would import and do first.

No backward runs here: autograd must not have started in a process that is forked.
"""

from __future__ import annotations

import gc
import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: threads would not survive the fork

import torch
import transformers.models.gpt2.modeling_gpt2
import transformers.models.llama.modeling_llama  # noqa: F401
from torch import nn

import partitioner.engine.engine
import partitioner.verify.verify  # noqa: F401
from cost_models.cluster import ClusterSpec
from partitioner import Workload, partition
from partitioner.models.as_graph import as_graph

_model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 1))
_batch = (torch.zeros(4, 2), torch.zeros(4, 1))
partition(
    as_graph(Workload(_model, _batch, lambda output, batch: (output - batch[1]).square().mean())),
    ClusterSpec.local(2),
    batch_size=4,
    microbatches=2,
)
gc.collect()
gc.freeze()
