"""Imported once, by the process that the tests' workers are forked from: what nearly all of them would import and do first.

No backward runs here, not even on fake tensors, so no model is planned: a build of torch for GPUs starts autograd's threads
then, and no process forked later can run a backward ("Unable to handle autograd's threading ...").
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
import partitioner.planning.best
import partitioner.planning.options
import partitioner.verify.verify
from tests.support.garbage import RARELY

partitioner.planning.options.AUTO_SECONDS = 2.0  # what ranks plan by themselves need not be the best

torch.export.export(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), (torch.zeros(4, 2),), strict=False)
gc.collect()
gc.freeze()
gc.set_threshold(*RARELY)
