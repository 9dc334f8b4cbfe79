"""The samples that a plan is verified on, and whose fault it is when the model fails on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cost_models.cluster import ClusterSpec
from cost_models.errors import ModelError, PartitionerError, UsageError
from cost_models.precision import Precision
from partitioner import Plan, Workload, partition
from partitioner.models.as_graph import as_graph
from partitioner.verify.samples import on_samples, sizes_to_try
from passes.graph.graph import OpGraph


class Prototypes(nn.Module):
    """Images beside a text of each class: as many classes as samples in the example, by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(6, 4), nn.Linear(3, 4)

    def forward(self, image: Tensor, classes: Tensor) -> Tensor:
        return self.image(image) @ self.text(classes).t()


def of_class(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch["label"])


class Narrow(nn.Module):
    """Code that takes one type of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            raise TypeError("only float32")
        return self.layer(x)


class Large(Narrow):
    def forward(self, x: Tensor) -> Tensor:
        torch._assert_async((x > 1e3).all(), "no large numbers")
        return self.layer(x)


def squared(output: Tensor, batch: Any) -> Tensor:
    return output.square().mean()


def planned(workload: Workload, batch_size: int, **options: Any) -> tuple[Plan, OpGraph]:
    graph = as_graph(workload, batch_dims=options.pop("batch_dims", None))
    return partition(
        graph, ClusterSpec.local(1), batch_size=batch_size, **{"strategy": "layer", **options}
    ), graph


def prototypes() -> Workload:
    torch.manual_seed(0)
    batch = {"image": torch.randn(8, 6), "classes": torch.randn(8, 3), "label": torch.arange(8)}
    return Workload(Prototypes(), batch, of_class)


def test_a_small_batch_is_tried_before_the_example() -> None:
    plan, graph = planned(prototypes(), 8, microbatches=2)
    assert sizes_to_try(plan, graph, 1) == [(2, 2), (4, 4)]
    assert sizes_to_try(plan, graph, 2) == [(2, 2), (4, 4)]
    assert sizes_to_try(plan, graph, 8) == [(8, 0)]  # no two micro-batches of the example's eight
    asked: list[tuple[int, ...]] = []

    def step(sizes: tuple[int, ...]) -> int:
        asked.append(sizes)
        if sum(sizes) < 8:
            raise IndexError("Target 7 is out of bounds.\nmore")
        return sum(sizes)

    done, notes = on_samples(plan, prototypes(), graph, 1, step)
    assert asked == [(2, 2), (4, 4)]
    assert done == 8
    assert notes == [
        "verified on the 8 samples of the example: on 4 of them, IndexError: Target 7 is out of bounds., so some input "
        "refers to others"
    ]
    assert on_samples(plan, prototypes(), graph, 1, sum) == (4, [])


def test_an_error_of_ours_is_passed_on() -> None:
    plan, graph = planned(prototypes(), 8)

    def step(sizes: tuple[int, ...]) -> None:
        raise UsageError("ours")

    with pytest.raises(PartitionerError, match="ours"):
        on_samples(plan, prototypes(), graph, 1, step)


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        (
            prototypes(),
            [
                "fails on a part of its batch",
                "image, classes, label cut to 4 samples: IndexError",
                "runs on example_inputs",
                "it runs with all of classes",
                "batch_dims={'classes': None}",
            ],
        ),
        (
            Workload(Large(), {"x": torch.randn(8, 6)}, squared),
            ["fails on its own", "on example_inputs, in its own types: RuntimeError", "no large numbers"],
        ),
    ],
    ids=["a part of the batch", "on its own"],
)
def test_it_is_said_whose_call_failed(workload: Workload, said: list[str]) -> None:
    plan, graph = planned(workload, 8, microbatches=2)
    before = {name: tensor.clone() for name, tensor in workload.model.state_dict().items()}
    with pytest.raises(ModelError) as caught:
        plan.verify(workload, graph=graph)
    for words in said:
        assert words in str(caught.value)
    assert ("fails on its own" in str(caught.value)) == ("fails on its own" in said)
    for name, tensor in workload.model.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in workload.model.parameters())


def test_a_model_that_fails_in_float64_under_a_precision_is_refused() -> None:
    """In its own types it would be compared; with which a plan in others has nothing to do."""
    workload = Workload(Narrow(), {"x": torch.randn(8, 6)}, squared)
    options: dict[str, Any] = {"batch_size": 8, "precision": Precision(gradients=torch.float32)}
    plan = partition(workload, ClusterSpec.local(1), **{"strategy": "layer", **options})
    with pytest.raises(ModelError) as caught:
        plan.verify(workload)
    assert "our call, with its tensors widened: TypeError: only float32" in str(caught.value)
    assert "verify a plan in the model's own types" in str(caught.value)
