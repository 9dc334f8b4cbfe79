"""The roofline, and how ops add up to a segment."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from cost_models.compute import (
    MOST_ALIGNED_SHARE,
    OPTIMIZER_PASSES,
    PhaseSeconds,
    additive_seconds,
    kernel_seconds,
    optimizer_seconds,
    segment_seconds,
)
from cost_models.memory import StateBytes
from tests.unit.cost_models.stand_in import ALL, StandIn


def test_a_cpu_hides_the_shorter_of_arithmetic_and_memory_traffic():
    device = StandIn("cpu")
    assert kernel_seconds(2e9, 1e9, device, torch.float32, "matmul") == 2.0
    assert kernel_seconds(1e9, 3e9, device, torch.float32, "matmul") == 3.0


def test_plain_cores_have_an_efficiency_of_their_own_on_a_gpu_alone():
    efficiency = {**ALL, "matmul": 0.5, "vector": 0.25}
    gpu, cpu = (StandIn(kind, efficiency=efficiency) for kind in ("cuda", "cpu"))
    assert kernel_seconds(1e9, 0, gpu, torch.float16, "matmul") == 2.0
    assert kernel_seconds(1e9, 0, gpu, torch.float32, "matmul") == 4.0
    assert kernel_seconds(1e9, 0, cpu, torch.float32, "matmul") == 2.0


def test_arithmetic_and_memory_traffic_add_up_on_a_gpu():
    device = StandIn("cuda")
    assert kernel_seconds(2e9, 1e9, device, torch.float32, "matmul") == 3.0
    assert kernel_seconds(1e9, 3e9, device, torch.float32, "matmul") == 4.0


def test_convolutions_of_float32_take_tf32_where_there_is_one():
    efficiency = {**ALL, "conv": 0.5, "vector": 0.25}
    ampere, volta = StandIn(efficiency=efficiency, tf32_peak=8e9), StandIn(efficiency=efficiency)
    assert kernel_seconds(1e9, 0, ampere, torch.float32, "conv") == 0.25
    assert kernel_seconds(1e9, 0, volta, torch.float32, "conv") == 4.0
    assert kernel_seconds(1e9, 0, ampere, torch.float32, "matmul") == 4.0


def test_products_of_unaligned_rows_lose_what_the_card_loses():
    device = StandIn(efficiency={**ALL, "unaligned": 0.5})
    shares = np.array([1.0, MOST_ALIGNED_SHARE, 2.0])
    found = kernel_seconds(np.full(3, 1e9), np.zeros(3), device, torch.bfloat16, "matmul", share=shares)
    assert found == pytest.approx([1.0, MOST_ALIGNED_SHARE, 4.0])


def test_a_causal_mask_leaves_half_of_the_arithmetic():
    assert kernel_seconds(2e9, 1e9, StandIn(), torch.float32, "attention", share=0.5) == 2.0


def test_attention_has_an_efficiency_of_its_own_in_backward():
    device = StandIn(efficiency={**ALL, "attention": 0.5, "attention_backward": 0.25})
    assert kernel_seconds(1e9, 0, device, torch.float32, "attention", backward=True) == 4.0
    assert kernel_seconds(1e9, 0, device, torch.float32, "conv", backward=True) == 1.0


def test_efficiency_is_taken_per_class_and_memory_has_its_own():
    device = StandIn(efficiency={**ALL, "attention": 0.5, "memory": 0.25})
    assert kernel_seconds(1e9, 0, device, torch.float32, "attention") == 2.0
    assert kernel_seconds(1e9, 0, device, torch.float32, "conv") == 1.0
    assert kernel_seconds(0, 1e9, device, torch.float32, "memory") == 4.0


def test_the_peak_is_the_data_types_own():
    assert kernel_seconds(1e9, 0, StandIn(), torch.float64, "matmul") == 2.0


def test_a_device_is_not_asked_for_a_rate_it_does_not_need():
    class NoFloat16(StandIn):
        def peak_flops(self, dtype: torch.dtype, *, allow_tf32: bool = False) -> float:
            raise KeyError(dtype)

    assert kernel_seconds(0, 1e9, NoFloat16(), torch.float16, "matmul") == 1.0
    with pytest.raises(KeyError):
        kernel_seconds(1, 1e9, NoFloat16(), torch.float16, "matmul")


def test_a_gpu_segment_overlaps_launches_and_kernels_over_all_its_ops():
    phase = PhaseSeconds(kernel=np.array([5.0, 1.0, 1.0]), launch=np.array([2.0, 2.0, 2.0]))
    assert segment_seconds(phase, StandIn("cuda")) == 7.0  # op by op it would be 5 + 2 + 2
    assert segment_seconds(phase, StandIn("cpu")) == 13.0
    assert segment_seconds(phase, StandIn("cuda"), np.array([1, 2])) == 4.0
    assert segment_seconds(phase, StandIn("cuda"), np.array([True, False, False])) == 5.0


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1, max_size=8),
    st.sampled_from(["cpu", "cuda"]),
)
def test_additive_seconds_add_up_to_the_whole_and_never_overcharge_a_part(pairs, kind):
    kernel, launch = np.array(pairs).T
    phase, device = PhaseSeconds(kernel, launch), StandIn(kind)
    per_op = additive_seconds(phase, device)
    assert per_op.sum() == pytest.approx(segment_seconds(phase, device))
    half = np.arange(len(pairs)) % 2 == 0
    assert per_op[half].sum() <= segment_seconds(phase, device, half) + 1e-9


def test_the_optimizer_is_bound_by_memory():
    adam = StateBytes(parameters=1_000, gradients=800, optimizer_state=1_600, trained=800)
    assert optimizer_seconds(adam, StandIn()) == pytest.approx((3 * 800 + 2 * 1_600) / 1e9)
    cast = StateBytes(parameters=1_000, gradients=800, optimizer_state=1_600, trained=800, cast=500)
    assert optimizer_seconds(cast, StandIn()) == pytest.approx((3 * 800 + 2 * 1_600 + 500) / 1e9)
    assert optimizer_seconds(StateBytes(parameters=1_000), StandIn()) == 0  # nothing trained, nothing moved
    seconds = [optimizer_seconds(adam, StandIn(kind), "adamw") for kind in ("cuda", "cpu")]
    assert seconds == pytest.approx([20 * 800 / 1e9, 7 * 800 / 1e9])
    assert optimizer_seconds(adam, StandIn("cuda"), "fused-adamw") == pytest.approx(7 * 800 / 1e9)
    host = optimizer_seconds(adam, StandIn("cuda"), "adamw", 10) - seconds[0]
    assert host == pytest.approx(10 * 1.2 * 1e-6)


class Counted(TorchDispatchMode):
    """Counts the tensors of full size that kernels read and write, each operand and result once."""

    passes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        operands = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor) and t.dim()]
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.dim()]
        written = len(made) or sum(
            1 for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write
        )
        if operands:
            self.passes += len({t.data_ptr() for t in operands}) + written
        return result


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("sgd", torch.optim.SGD, {}),
        ("momentum", torch.optim.SGD, {"momentum": 0.9}),
        ("adam", torch.optim.Adam, {}),
        ("adamw", torch.optim.AdamW, {}),
        ("amsgrad", torch.optim.Adam, {"amsgrad": True}),
    ],
)
def test_passes_are_those_of_the_optimizers_kernels(name, kind, options):
    parameter = torch.nn.Parameter(torch.randn(8))
    optimizer = kind([parameter], foreach=True, **options)
    for step in range(2):
        parameter.grad = torch.randn(8)
        with Counted() as counted:
            optimizer.step()
        assert step == 0 or counted.passes == OPTIMIZER_PASSES[name]
