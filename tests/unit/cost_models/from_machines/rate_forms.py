"""Outputs of nccl-tests and rccl-tests, kept small: written after public ones, which are named."""

from __future__ import annotations

from cost_models.from_machines.nccl_tests import FACTORS

WIDE = "#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw  busbw #wrong"
UNITS = "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)"
OLD = "#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error"


def run(
    collective: str,
    hosts: dict[str, int],
    rates: dict[int, float],
    card: str = "NVIDIA H100 80GB HBM3",
    header: str = WIDE,
    prefix: str = "",
    named: bool = True,
) -> str:
    """Write a run: algorithm bandwidths in GB/s by bytes of the message, in place a little faster."""
    ranks = [(host, device) for host, count in hosts.items() for device in range(count)]
    lines = [
        f"# nThread 1 nGpus 1 minBytes {min(rates)} maxBytes {max(rates)} step: 2(factor)",
        "#",
        "# Using devices",
    ]
    if named:
        lines.insert(0, f"# Collective test starting: {collective}_perf")
    lines += [
        f"#  Rank {rank:2} Group  0 Pid  {313 + rank} on {host:>10} device {device:2} [0x{16 + device:x}] {card}"
        for rank, (host, device) in enumerate(ranks)
    ]
    lines += ["#", header, UNITS]
    factor = FACTORS[collective](len(ranks))
    operation = "sum" if "reduce" in collective else "none"
    root = "" if "root" not in header else f" {0 if collective in ('reduce', 'broadcast') else -1}"
    wrong = "0e+00" if "error" in header else "0"
    for size, rate in rates.items():
        half = [
            f"{size / 1e3 / max(r, 1e-3):.2f} {r:.2f} {r * factor:.2f} {wrong}" for r in (rate, rate * 1.01)
        ]
        lines.append(f"{size:12} {size // 4:12} float {operation}{root} {' '.join(half)}")
    lines += ["# Out of bounds values : 0 OK", "# Avg bus bandwidth    : 14.9966", "#"]
    return "".join(f"{prefix}{line}\n" for line in lines)


G = 2**30


def _old(collective: str, column: str) -> str:
    """Write a run of 2021, whose header does not name the collective."""
    text = run(collective, {"localhost": 8}, {8 * G: 235.1}, header=OLD.replace("redop", column), named=False)
    return text.replace(" none ", " ")


H100 = {"worker-0": 8}
TESTS: dict[str, tuple[str, list[tuple[str, int, int]]]] = {
    # a verbatim row of Oracle's pages: 16 A100 on two hosts
    "oracle": (
        run("all_reduce", {"inst-a-gpu4": 8, "inst-b-gpu4": 8}, {10 * G: 118.87}, "NVIDIA A100-SXM4-40GB"),
        [("all_reduce", 16, 2)],
    ),
    # IBM/pytorch-communication-benchmarks#1
    "eight h100": (run("all_reduce", H100, {2**23: 60.0, G: 270.0, 16 * G: 274.2}), [("all_reduce", 8, 1)]),
    # nebius/soperator#428
    "two hosts": (run("all_reduce", {"worker-1": 8, "worker-0": 8}, {8 * G: 256.0}), [("all_reduce", 16, 2)]),
    # two DGX Spark: one GPU each
    "spark": (
        run("all_gather", {"spark-a": 1, "spark-b": 1}, {4 * G: 44.28}, "NVIDIA GB10"),
        [("all_gather", 2, 2)],
    ),
    "reduce-scatter": (run("reduce_scatter", H100, {G: 400.0}), [("reduce_scatter", 8, 1)]),
    "send and receive": (run("sendrecv", {"a": 2}, {G: 26.3}, "NVIDIA L40S"), [("sendrecv", 2, 1)]),
    "all-to-all": (run("alltoall", H100, {G: 340.0}), [("alltoall", 8, 1)]),
    "broadcast": (run("broadcast", H100, {G: 340.0}), [("broadcast", 8, 1)]),
    # NVIDIA/nccl#428 (2020): no root, errors, no group
    "old": (
        run("all_reduce", {"ai-1": 2}, {2**27: 5.2}, "Tesla T4", header=OLD).replace(" Group  0", ""),
        [("all_reduce", 2, 1)],
    ),
    # microsoft/superbenchmark: each collective has its own columns
    "old all-gather": (_old("all_gather", ""), [("all_gather", 8, 1)]),
    "old broadcast": (_old("broadcast", "root"), [("broadcast", 8, 1)]),
    "old all-to-all": (_old("alltoall", "redop"), [("alltoall", 8, 1)]),
    # ROCm/rccl: AMD's names, no group
    "rccl": (run("all_reduce", {"deep-3": 2}, {2**27: 11.01}, "AMD Instinct MI210"), [("all_reduce", 2, 1)]),
    # NVIDIA/nccl#1453: a launcher writes [0] before each line
    "tagged": (run("all_reduce", H100, {G: 200.0}, prefix="[0] "), [("all_reduce", 8, 1)]),
    "tagged by mpirun": (
        run("all_gather", H100, {G: 300.0}, prefix="[1,0]<stdout>:"),
        [("all_gather", 8, 1)],
    ),
    # NCCL's own lines between them
    "with debug lines": (
        run("all_reduce", H100, {G: 200.0}).replace(
            "# Out of", "h:880:880 [1] NCCL INFO comm 0x55 rank 0\n# Out of"
        ),
        [("all_reduce", 8, 1)],
    ),
    "two runs": (
        run("all_reduce", H100, {G: 200.0}) + run("all_gather", H100, {G: 300.0}),
        [("all_reduce", 8, 1), ("all_gather", 8, 1)],
    ),
    # the name is not said, but an all-reduce alone has such a factor
    "without a name": (run("all_reduce", H100, {G: 200.0}, named=False), [("all_reduce", 8, 1)]),
    "rows alone": (
        "$ ./all_reduce_perf -b 8 -e 8G -f 2 -g 8\n"
        + WIDE
        + "\n8589934592 2147483648 float sum -1 64250 133.70 233.97 0 64271 133.65 233.89 0\n",
        [("all_reduce", 8, 1)],
    ),
}
"""By name: the output, and of each run the collective, its ranks and hosts."""
