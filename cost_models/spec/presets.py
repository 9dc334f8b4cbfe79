"""Hardware by name, in the vocabulary of a cluster file. Every number has its source beside it.

Rates are *dense* (data sheets headline the sparse ones, twice as high) and per direction (data sheets add both).
Memory is what ``torch.cuda.get_device_properties(0).total_memory`` reports, not what the box says;
``memory_reserved`` is kept free on top: the CUDA context (about 0.5 GiB), NCCL's buffers, fragmentation. It is an
allowance, not a measurement. ``launch_overhead`` (15 us) is what an eager PyTorch operation with its node of the autograd
graph takes the host: the mean of forward and backward beside an H100 (``benchmarks/data/h100-80gb.json``, torch 2.11).
``kernel_overhead``: the smallest products in OpenXLA's table for an H100 take 5.2 us, of which their work is 0.1
(xla/service/gpu/model/matmul_interpolator_data.h); elementwise kernels take 2 to 3; 4 between them.

Sources
    [V100]  NVIDIA V100 data sheet (2020), SXM2           [A100]  NVIDIA A100 80GB data sheet (2021), SXM
    [H100]  NVIDIA H100 data sheet (2023), SXM5           [H200]  NVIDIA H200 data sheet (2024), SXM
    [TX]    GeForce GTX Titan X (Maxwell, 2015) specification; float64 is 1/32 of float32 (GM200)
    [580]   GeForce GTX 580 (Fermi, 2010) specification with 3 GB; float64 is 1/8 of float32
    [mem]   "total capacity" in PyTorch's own out-of-memory messages for the card
    [unchecked]  recalled, not looked up nor measured; the first calibration on such a card should replace it
    [PCIe]  PCI-SIG base specifications: 16 lanes, after line coding (8b/10b for 2.0, else 128b/130b)
    [NCCL]  the latency table in NVIDIA/nccl src/graph/tuning.cc, ring, simple protocol: NVLink 3.4 us,
            PCI 5.7 us, network 9.6 us
    [RING]  bandwidth that NCCL's rings reach with 1 GiB and more on eight devices (``busbw`` of nccl-tests): V100 129-135
            (OCI's tutorial), A100 235 (microsoft/superbenchmark's log of Azure NDv4), H100 357-369 (NVIDIA/nccl issue
            1047, NVIDIA/dgxc-benchmarking with NVLS off). PresetKeys sheets have 150, 300 and 450
    [SHARP] bytes per second of all-reduces of eight devices that NVSwitch of the third generation sums: 273 (NVIDIA/nccl
            issue 1455), 275 (a maintainer in NVIDIA/nccl-tests issue 212), 276 (stas00/ml-engineering, 8 x H200)
    [DGX]   NVIDIA DGX-1, DGX A100 and DGX H100 user guides
    [XLA]    the table of matrix products in OpenXLA's GPU cost model (xla/service/gpu/model/matmul_interpolator_data.h,
             2025): 125 shapes of 256 to 4,096 on an H100, short runs: 0.79 of the peak at 4,096
    [ML]     stas00/ml-engineering, compute/accelerator: best matrix products of warm cards: A100 0.87, H100 0.80; long runs
             at m = 16,384 reach 0.56 to 0.60 on an H100 (float8_experimental, pull request 100)
    [COOK]   EleutherAI/cookbook, sizing/results (2023): products on A100 and V100, in steps of 64: 0.81 and 0.71 of the
             peak at 8,192 x 8,192 x 4,096
    [FA2]    FlashAttention-2: on A100 0.5 to 0.73 of the peak forward (arXiv 2307.08691); on H100 0.30 to 0.37 forward,
             0.29 to 0.33 backward (FlashAttention-3, arXiv 2407.08608, figures 5 and 6)
    [FIT]    fitted on the published runs of llm-foundry of 2023 (``python -m benchmarks.published``): its attention kernels
             are older than FlashAttention-2
    [MM32]   float32 products: 51.5 of 67 TFLOP/s (pytorch's and Triton's issues; A100 0.90 to 0.97, V100 0.89)
    [CONV]   float32 convolutions as torch runs them (tf32, cuDNN 9.19, torch 2.11), 64 to 1,024 channels of an H100: 0.19
             to 0.41 of the tf32 peak, copies to the order of channels last included (``make gpu``, docs/10)
    [ODD]    bfloat16 products on an H100 whose rows do not begin at 16 bytes: 0.34 to 0.40 of the speed of others with
             even, 0.13 to 0.19 with odd numbers of columns (torch 2.11, as above), where an A100 has 0.55 and 0.29
    [COPY]   copies and elementwise kernels: V100 0.82 to 0.87 of the data sheet's bandwidth, A100 with 40 GB 0.87, with
             80 GB 0.73 to 0.79, H100 0.78 to 0.90 (BabelStream's threads, mli/transformers-benchmarks, KernelBench)
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

PresetKeys = Mapping[str, Any]

# --------------------------------------------------------------------------------------------------
# Devices: the keys of ``device`` in a cluster file.

# [A100]; float64 on tensor cores (9.7 without)
_A100_FLOPS = {"float64": "19.5T", "float32": "19.5T", "tf32": "156T", "bfloat16": "312T", "float16": "312T"}
# [H100]: the sheet's tensor-core numbers are sparse, these are half; float64 on tensor cores (34 without)
_H100_FLOPS = {
    "float64": "67T",
    "float32": "67T",
    "tf32": "494.7T",
    "bfloat16": "989.4T",
    "float16": "989.4T",
    "float8": "1978.9T",
}

DEVICES: Mapping[str, PresetKeys] = {
    "V100-16GB": {
        "kind": "cuda",
        "memory": "15.78GiB",  # [mem]
        "memory_reserved": "1GiB",
        "memory_bandwidth": "900GB/s",  # [V100]
        "flops": {"float64": "7.8T", "float32": "15.7T", "float16": "125T"},  # [V100], as below
        "launch_overhead": "15us",
        "kernel_overhead": "4us",
    },
    "V100-32GB": {
        "kind": "cuda",
        "memory": "31.74GiB",  # [mem]
        "memory_reserved": "1GiB",
        "memory_bandwidth": "900GB/s",  # [V100]
        # [V100]; the 125 are tensor cores. No bfloat16 in hardware, so it is absent and refused.
        "flops": {"float64": "7.8T", "float32": "15.7T", "float16": "125T"},
        "launch_overhead": "15us",
        "kernel_overhead": "4us",
    },
    "A100-40GB": {
        "kind": "cuda",
        "memory": "39.5GiB",  # [mem]
        "memory_reserved": "1GiB",
        "memory_bandwidth": "1555GB/s",  # [A100], the 40 GB card
        "flops": _A100_FLOPS,
        "launch_overhead": "15us",
        "kernel_overhead": "4us",
    },
    "A100-80GB": {
        "kind": "cuda",
        "memory": "79.25GiB",  # [mem]
        "memory_reserved": "1GiB",
        "memory_bandwidth": "2039GB/s",  # [A100]
        "flops": _A100_FLOPS,
        "launch_overhead": "15us",
        "kernel_overhead": "4us",
    },
    "H100-80GB": {
        "kind": "cuda",
        "memory": "79.1GiB",  # [unchecked]
        "memory_reserved": "1GiB",
        "memory_bandwidth": "3350GB/s",  # [H100]
        "flops": _H100_FLOPS,
        "launch_overhead": "15us",
        "kernel_overhead": "4us",
    },
    "H200-141GB": {
        "kind": "cuda",
        "memory": "139.8GiB",  # [unchecked]
        "memory_reserved": "1GiB",
        "memory_bandwidth": "4800GB/s",  # [H200]
        "flops": _H100_FLOPS,  # [H200]: the compute of an H100
        "launch_overhead": "15us",
        "kernel_overhead": "4us",
    },
    "TitanX-12GB": {
        "kind": "cuda",
        "memory": "11.92GiB",  # [mem]
        "memory_reserved": "512MiB",
        "memory_bandwidth": "336.5GB/s",  # [TX]
        # [TX]: 3072 cores × 2 × 1.075 GHz boost. float16 is computed as float32, so it is absent.
        "flops": {"float64": "0.206T", "float32": "6.6T"},
        "launch_overhead": "15us",
        "kernel_overhead": "4us",
    },
    "GTX580-3GB": {
        "kind": "cuda",
        "memory": "3GiB",  # nominal: no PyTorch release reports this card
        "memory_reserved": "256MiB",
        "memory_bandwidth": "192.4GB/s",  # [580]
        "flops": {"float64": "0.198T", "float32": "1.581T"},  # [580]: 512 cores × 2 × 1.544 GHz
        "launch_overhead": "30us",  # an assumption: hosts of its time are half as fast
    },
    # One thread of a server CPU. Measured on one core of an AMD EPYC with AVX-512, torch 2.13: matmul of
    # 1024 × 1024: float64 54, float32 109, bfloat16 485, float16 1.1 GFLOP/s; one eager add on 8 elements 2.1 us.
    # Rounded down; bfloat16 as float32, since not every CPU has its instructions. Calibrate to replace.
    "cpu-worker": {
        "kind": "cpu",
        "memory": "4GiB",
        "memory_bandwidth": "20GB/s",
        "flops": {"float64": "50G", "float32": "100G", "bfloat16": "100G", "float16": "1G"},
        "launch_overhead": "2us",
    },
}

# --------------------------------------------------------------------------------------------------
# Links: bandwidth per direction as it is reached, one-way latency. NVLink is what one device has in all (all its links).

LINKS: Mapping[str, PresetKeys] = {
    "NVLink2": {"bandwidth": "130GB/s", "latency": "3.4us"},  # [V100] of 6 × 25 GB/s; [RING] 129-135; [NCCL]
    "NVLink3": {"bandwidth": "235GB/s", "latency": "3.4us"},  # [A100] of 12 × 25 GB/s; [RING]; [NCCL]
    "NVLink4": {"bandwidth": "365GB/s", "latency": "3.4us"},  # [H100] of 18 × 25 GB/s; [RING] 357-369; [NCCL]
    # NVSwitch joins all devices of a machine at each one's full NVLink rate: here of the DGX H100.
    # It sums itself: [SHARP].
    "NVSwitch": {
        "bandwidth": "365GB/s",
        "latency": "3.4us",
        "in_network": "275GB/s",
    },  # [DGX]; [RING]; [NCCL]
    "PCIe2": {"bandwidth": "8GB/s", "latency": "5.7us"},  # [PCIe] 16 × 5 GT/s; [NCCL]
    "PCIe3": {"bandwidth": "15.75GB/s", "latency": "5.7us"},  # [PCIe] 16 × 8 GT/s; [NCCL]
    "PCIe4": {"bandwidth": "31.5GB/s", "latency": "5.7us"},  # [PCIe] 16 × 16 GT/s; [NCCL]
    "PCIe5": {"bandwidth": "63GB/s", "latency": "5.7us"},  # [PCIe] 16 × 32 GT/s; [NCCL]
    # Line rates. TCP through two kernels takes 15-50 us one way; 30 us is an assumption, not a specification.
    "Ethernet-25G": {"bandwidth": "25Gb/s", "latency": "30us"},
    "Ethernet-100G": {"bandwidth": "100Gb/s", "latency": "30us"},
    "InfiniBand-EDR": {"bandwidth": "100Gb/s", "latency": "9.6us"},  # InfiniBand Trade Association; [NCCL]
    "InfiniBand-HDR": {"bandwidth": "200Gb/s", "latency": "9.6us"},
    "InfiniBand-NDR": {"bandwidth": "400Gb/s", "latency": "9.6us"},
    # Gloo between two processes of one machine, measured on two cores: 1 KB 50-88 us, 64 MB in 18-44 ms one way.
    # Half duplex, because an all-reduce of 64 MB (64 MB each way) takes 39-76 ms: the cores do the copying.
    "Gloo-local": {"bandwidth": "2GB/s", "latency": "70us", "duplex": "half"},
}

# --------------------------------------------------------------------------------------------------
# Machines: the keys of a node, and the network between several of them.

_ONE, _TWO = {"bandwidth": "25GB/s", "latency": "3.4us"}, {"bandwidth": "50GB/s", "latency": "3.4us"}

MACHINES: Mapping[str, PresetKeys] = {
    "dgx-v100": {
        "count": 8,
        "device": {"preset": "V100-32GB"},
        "links": {
            # The hybrid cube mesh of [DGX], as `nvidia-smi topo -m` prints it: NV1, NV2, everything else PCIe.
            "default": {"preset": "PCIe3"},
            "pairs": [
                *({"between": list(pair), **_ONE} for pair in ((0, 1), (0, 2), (1, 3), (2, 6), (3, 7))),
                *({"between": list(pair), **_ONE} for pair in ((4, 5), (4, 6), (5, 7))),
                *({"between": list(pair), **_TWO} for pair in ((0, 3), (0, 4), (1, 2), (1, 5), (2, 3))),
                *({"between": list(pair), **_TWO} for pair in ((4, 7), (5, 6), (6, 7))),
            ],
        },
        "host_memory": "512GB",
    },
    "dgx-a100": {
        "count": 8,
        "device": {"preset": "A100-80GB"},
        "links": {"default": {"preset": "NVLink3"}},
        "host_memory": "2TB",
    },
    "dgx-h100": {
        "count": 8,
        "device": {"preset": "H100-80GB"},
        "links": {"default": {"preset": "NVSwitch"}},
        "host_memory": "2TB",
    },
}

MACHINE_NETWORKS: Mapping[str, PresetKeys] = {
    "dgx-v100": {"preset": "InfiniBand-EDR", "cards": 4},  # [DGX] four cards, each shared by two GPUs
    "dgx-a100": {"preset": "InfiniBand-HDR", "per": "device"},  # [DGX] eight compute cards
    "dgx-h100": {"preset": "InfiniBand-NDR", "per": "device"},  # [DGX] eight compute cards
}

DEVICE_LINKS: Mapping[str, str] = {
    "V100-16GB": "NVLink2",
    "V100-32GB": "NVLink2",
    "A100-40GB": "NVLink3",
    "A100-80GB": "NVLink3",
    "H100-80GB": "NVSwitch",
    "H200-141GB": "NVSwitch",
    "TitanX-12GB": "PCIe3",
    "GTX580-3GB": "PCIe2",
    "cpu-worker": "Gloo-local",
}
"""The link that joins several of a device in one machine when only the device is named (``H100-80GB:4``)."""

# --------------------------------------------------------------------------------------------------
# Stacks: the part of a device's peak that the software of a time reaches, on each device that was measured with it.
#
# What the same card achieves differs by more than half between its first software and later: attention kernels became
# two to four times as fast, products somewhat. So a prediction names the stack that it assumes. A cluster file chooses
# one by the key ``stack`` of a device; without it, it is the newest (``NEWEST``). A device without an entry has the
# rules of thumb of ``cost_models.devices``.
#
# Attention counts the products that a causal mask leaves.

NEWEST = "2025"
"""The stack that is assumed where none is named: torch 2.4 and newer, with FlashAttention-2."""

_A100 = {"matmul": 0.80, "attention": 0.60, "attention_backward": 0.50}  # [COOK] [FA2]
_H100 = {
    "matmul": 0.70,
    "attention": 0.33,
    "attention_backward": 0.30,
    "conv": 0.35,
    "vector": 0.77,
    "memory": 0.80,
    "unaligned": 0.6,
}  # [ML] [FA2] [CONV] [MM32] [COPY] [ODD]
_V100 = {"matmul": 0.71, "memory": 0.85}  # [COOK] [COPY]
# [FIT] [FIT] [COPY]; the memory's part is that of cards with 80 GB. Those with 40 GB copy at 0.87: theirs counts as fitted
_A100_2023 = {"attention": 0.37, "attention_backward": 0.28, "memory": 0.75}
_H100_2023 = {
    "matmul": 0.68,
    "attention": 0.27,
    "attention_backward": 0.15,
    "memory": 0.75,
}  # [ML] [FIT] [FIT] [FIT]

STACKS: Mapping[str, Mapping[str, Mapping[str, float]]] = MappingProxyType(
    {
        NEWEST: {
            "V100-16GB": _V100,
            "V100-32GB": _V100,
            "A100-40GB": {**_A100, "memory": 0.87},  # [COPY]
            "A100-80GB": {**_A100, "memory": 0.76},  # [COPY]
            "H100-80GB": _H100,
            "H200-141GB": _H100,
        },
        "2023": {"A100-40GB": _A100_2023, "A100-80GB": _A100_2023, "H100-80GB": _H100_2023},
    }
)
"""Efficiencies (``cost_models.devices.EFFICIENCY_NAMES``) by stack and device preset."""


def efficiency_of(preset: str, stack: str | None) -> Mapping[str, float]:
    """Return the efficiencies of a preset with a stack; what the stack does not know is as with the newest."""
    newest = STACKS[NEWEST].get(preset, {})
    return {**newest, **STACKS[stack or NEWEST].get(preset, {})}
