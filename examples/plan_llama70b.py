"""Plan how a 70B model trains on 64 GPUs, on a laptop: the model has no weights, the cluster is a file.

    python examples/plan_llama70b.py --cluster docs/clusters/dgx-h100-8-nodes.yaml --save plan.json

This takes about a minute: tracing 80 layers once, then one search per optimizer.
"""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner import ClusterSpec, InfeasibleError, Precision, partition, trace

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("--cluster", default="docs/clusters/dgx-h100-8-nodes.yaml")
arguments.add_argument("--layers", type=int, default=80)
arguments.add_argument("--tokens", type=int, default=4096, help="per sample")
arguments.add_argument("--save", default="plan.json")
given = arguments.parse_args()

shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "vocab_size": 128256}
config = LlamaConfig(num_hidden_layers=given.layers, num_key_value_heads=8, **shape)
with torch.device("meta"):
    model = LlamaForCausalLM(config).to(torch.bfloat16)  # Hugging Face builds float32 where nothing is said
    tokens = torch.zeros(2, given.tokens, dtype=torch.long)

cluster = ClusterSpec.load(given.cluster)
graph = trace(model, {"input_ids": tokens, "labels": tokens}, name="llama-70b")
plan = partition(graph, cluster, batch_size=512)
print(plan)
plan.save(given.save)

print("\noptimizer        precision      step   fullest device")
masters = Precision(master=torch.float32)
for optimizer, precision in (("adamw", None), ("adamw", masters), ("sgd", None), ("none", None)):
    kept = "float32 masters" if precision else "bfloat16 only"
    other = plan  # AdamW without masters is what was planned
    if (optimizer, precision) != ("adamw", None):
        try:
            other = partition(graph, cluster, batch_size=512, optimizer_memory=optimizer, precision=precision)
        except InfeasibleError as error:
            print(f"{optimizer:10}{kept:>16}   does not fit: {error.because[-1]}")
            continue
    peak = max(other.prediction.peak_memory_bytes.values()) / 2**30
    print(f"{optimizer:10}{kept:>16}{other.prediction.step_seconds:8.1f} s{peak:10.1f} GiB")
