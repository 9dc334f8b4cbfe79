"""Trace a model once, then compare schedules, micro-batches, recomputation and clusters as a table.

python examples/compare_strategies.py
"""

from byte_text import gpt

from partitioner import ClusterSpec, InfeasibleError, partition, trace

CLUSTERS = {
    "2 local workers": ClusterSpec.local(2),
    "4 local workers": ClusterSpec.local(4),
    "one A100 node": ClusterSpec.preset("dgx-a100"),
}
CHOICES = [
    {"schedule": "gpipe", "microbatches": 8},
    {"schedule": "1f1b", "microbatches": 4},
    {"schedule": "1f1b", "microbatches": 8},
    {"schedule": "zb-h1", "microbatches": 8},
    {"schedule": "1f1b", "microbatches": 8, "recompute": "full"},
    {},  # schedule="auto", microbatches="auto", recompute="auto"
]

workload = gpt(layers=6, width=256)
graph = trace(workload.model, workload.example_inputs, name=workload.name)

print(
    f"{'cluster':18}{'schedule':10}{'pieces':>7}{'stages':>8}{'recomputed':>12}{'step':>10}{'bubble':>8}{'peak':>11}"
)
for name, cluster in CLUSTERS.items():
    for choice in CHOICES:
        try:
            plan = partition(graph, cluster, batch_size=64, **choice)
        except InfeasibleError as error:
            print(f"{name:18}{choice}: {error.because[0]}")
            continue
        found, recomputed = plan.prediction, sum(len(stage.recomputed_blocks) for stage in plan.stages)
        print(
            f"{name:18}{plan.schedule:10}{plan.microbatches:7}{len(plan.stages):8}{recomputed:12}"
            f"{found.step_seconds * 1e3:7.1f} ms{found.bubble_fraction:8.1%}"
            f"{max(found.peak_memory_bytes.values()) / 2**20:7.1f} MiB"
        )
