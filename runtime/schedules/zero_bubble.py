"""Zero-bubble schedules: the weight half of backward, which nobody waits for, fills the bubbles.

Source: Qi, Wan, Huang, Lin 2024, "Zero Bubble Pipeline Parallelism", arXiv 2401.10241 (ZB-H1, ZB-H2), and
"Pipeline Parallelism with Controllable Memory", arXiv 2405.15362 (ZB-V). Steps as in ``pipelines``; I is
the input half, W the weight half. "Zero bubble" means that a rank never idles between its first and its last
step; rank i still starts i steps after rank 0.
"""

from __future__ import annotations

from collections import Counter

from runtime.program.program import Letter
from runtime.schedules.held import ComputeStep


def zb_h1(position: int, ranks: int, chunks: int, microbatches: int) -> list[ComputeStep]:
    """Run 1F1B with weight halves that lag behind by i micro-batches on rank i.

    With F=I=W=1 and m >= p the step takes 3m + p-1: a third of 1F1B's bubble. Rank i holds p-i micro-batches
    whole, as in 1F1B, and i more of which only the weight half is left: p in all, as 1F1B on its first rank.

        rank 0  F0 F1  . I0 W0 F2 I1 W1 I2 W2
        rank 1   . F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    return _lagging_weights(microbatches, ranks - position, position)


def zb_h2(position: int, ranks: int, chunks: int, microbatches: int) -> list[ComputeStep]:
    """Run ZB-H1 with so many forwards ahead (2(p-i)-1 on rank i) that no bubble is left.

    Weight halves lag by 2i: 2p-1 micro-batches are held in all. With F=I=W=1 and m >= 2p-1 each rank is busy
    without a pause, for 3m.

        rank 0  F0 F1 F2 I0 W0 I1 W1 I2 W2  .
        rank 1   . F0 I0 F1 I1 F2 I2 W0 W1 W2
    """
    return _lagging_weights(microbatches, 2 * (ranks - position) - 1, 2 * position)


def _lagging_weights(microbatches: int, ahead: int, lag: int) -> list[ComputeStep]:
    """Run forwards ``ahead`` of the input halves and weight halves ``lag`` micro-batches behind them."""
    steps: list[ComputeStep] = [("F", 0, j) for j in range(min(microbatches, ahead - 1))]
    for j in range(microbatches):
        if j + ahead - 1 < microbatches:
            steps.append(("F", 0, j + ahead - 1))
        steps.append(("I", 0, j))
        if j >= lag:
            steps.append(("W", 0, j - lag))
    steps += [("W", 0, j) for j in range(max(0, microbatches - lag), microbatches)]
    return steps


def zb_v(position: int, ranks: int, chunks: int, microbatches: int) -> list[ComputeStep]:
    """Run two chunks per rank, placed as a V: rank i runs stages i and 2p-1-i, the last rank turns round alone.

    Zero bubble for F=I=W and m >= 2p-1. A rank holds at most 2p chunks, in bytes the p stages that 1F1B holds
    on its first rank (its stages are twice as large). Fewer than 2p-1 micro-batches run the order for 2p-1
    without those that do not exist.
    """
    padded = max(microbatches, 2 * ranks - 1)
    steps: list[ComputeStep] = []
    done: Counter[tuple[Letter, int]] = Counter()

    def run(kind: Letter, chunk: int) -> None:
        microbatch = done[kind, chunk]
        done[kind, chunk] += 1
        if microbatch < microbatches:
            steps.append((kind, chunk, microbatch))

    def backward(chunk: int) -> None:
        run("I", chunk)
        run("W", chunk)

    # Fill: the first micro-batches go down the V, then down and up in turn.
    for _ in range(2 * (ranks - position) - 1):
        run("F", 0)
    for _ in range(position):
        run("F", 1)
        run("F", 0)
    for _ in range(ranks - position):
        run("F", 1)
        backward(1)
    # Steady: a forward and a backward of each chunk in turn.
    while done["F", 1] < padded:
        if done["F", 0] < padded:
            run("F", 0)
        backward(0)
        run("F", 1)
        backward(1)
    # Drain: input halves first, for the ranks before; weight halves fill the rest.
    for _ in range(position):
        run("I", 0)
        run("I", 1)
    for _ in range(ranks - position):
        backward(0)
    for chunk in (1, 0):
        while done["W", chunk] < padded:
            run("W", chunk)
    return steps
