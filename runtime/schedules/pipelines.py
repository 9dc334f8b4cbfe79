"""Pipeline schedules with a whole backward: GPipe, 1F1B and interleaved 1F1B.

Each function returns what one rank does, as steps (kind, chunk, micro-batch):

    position      the rank's place in the pipeline, 0 .. ranks-1
    ranks         p, the length of the pipeline
    chunks        v, stages per rank; chunk c is the c-th lowest stage of the rank
    microbatches  m

They are published for a chain of stages. Any other value edges (skips, branches) go from lower to higher
stages as well, so the chain's own order already satisfies them.
"""

from __future__ import annotations

from runtime.schedules.held import ComputeStep


def gpipe(position: int, ranks: int, chunks: int, microbatches: int) -> list[ComputeStep]:
    """Run all forwards, then all backwards.

    Backwards run in the order of the forwards (the paper draws them reversed; time and memory are the same),
    so that gradients are added up in the order in which the unpartitioned model adds them.

    Bubble (p-1)/(m+p-1); every rank holds m micro-batches.
    Source: Huang et al. 2019, "GPipe", arXiv 1811.06965, figure 2c.

        rank 0  F0 F1 F2  .  . B0 B1 B2
        rank 1   . F0 F1 F2 B0 B1 B2  .
    """
    steps: list[ComputeStep] = [("F", 0, j) for j in range(microbatches)]
    steps += [("B", 0, j) for j in range(microbatches)]
    return steps


def one_f_one_b(position: int, ranks: int, chunks: int, microbatches: int) -> list[ComputeStep]:
    """Run p-1-i forwards to fill the pipeline, then one forward and one backward in turn.

    Bubble (p-1)/(m+p-1), as GPipe; rank i holds only min(m, p-i) micro-batches.
    Source: Narayanan et al. 2019, "PipeDream"; with a flush: Fan et al. 2021, "DAPPLE", arXiv 2007.01045.

        rank 0  F0 F1  . B0 F2 B1  . B2
        rank 1   . F0 B0 F1 B1 F2 B2  .
    """
    warmup = min(microbatches, ranks - 1 - position)
    steps: list[ComputeStep] = [("F", 0, j) for j in range(warmup)]
    for j in range(microbatches - warmup):
        steps.append(("F", 0, warmup + j))
        steps.append(("B", 0, j))
    steps += [("B", 0, j) for j in range(microbatches - warmup, microbatches)]
    return steps


def interleaved(position: int, ranks: int, chunks: int, microbatches: int) -> list[ComputeStep]:
    """Run 1F1B over v chunks per rank: micro-batches go round the ranks v times, in groups.

    Megatron-LM's groups are of p micro-batches, so p must divide m. Here m//p groups share the micro-batches
    evenly (all of size p where p divides m, else up to 2p-1 in one), which keeps the bubble at (p-1)/(vm+p-1)
    for every m >= p. Fewer micro-batches than ranks run the order for p without those that do not exist: what
    remains of an order that can run, can run.

    Source: Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", arXiv 2104.04473, section 2.2.2.
    """
    forwards: list[ComputeStep] = []
    backwards: list[ComputeStep] = []
    sizes = _group_sizes(ranks, microbatches)
    first = 0
    for size in sizes:
        for chunk in range(chunks):
            group = range(first, first + size)
            forwards += [("F", chunk, j) for j in group]
            backwards += [("B", chunks - 1 - chunk, j) for j in group]
        first += size
    warmup = min(len(forwards), 2 * (ranks - 1 - position) + (chunks - 1) * max(sizes))
    steps = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        steps += (forward, backward)
    steps += backwards[len(forwards) - warmup :]
    return [step for step in steps if step[2] < microbatches]


def _group_sizes(ranks: int, microbatches: int) -> list[int]:
    groups = max(1, microbatches // ranks)
    size, larger = divmod(max(microbatches, ranks), groups)
    return [size + (k < larger) for k in range(groups)]
