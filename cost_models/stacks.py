"""Stacks: the part of a device's peak that the software of a time reaches, on each device that was measured with it.

What the same card achieves differs by more than half between its first software and later: attention kernels became two to
four times as fast, products somewhat. So a prediction names the stack that it assumes. A cluster file chooses one by the
key ``stack`` of a device; without it, it is the newest (``NEWEST``). A device without an entry has the rules of thumb of
``cost_models.devices``.

Attention counts the products that a causal mask leaves.

Sources
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
