"""Plain data with tensors in it, there and back."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict
from typing import Any

import pytest
import torch

from cost_models.errors import CheckpointError
from runtime.checkpoint.tree import decode, encode, tensor_names


def round_trip(value: Any) -> Any:
    data, tensors = encode(value, "extra")
    text = json.dumps(data, allow_nan=False)
    assert set(tensor_names(json.loads(text))) == set(tensors)
    return decode(json.loads(text), tensors)


PLAIN: list[Any] = [
    None,
    True,
    7,
    2**70,
    0.1,
    -0.0,
    math.inf,
    1 + 2j,
    complex(math.inf, 0),
    "text",
    [],
    {},
    (),
    [1, [2, (3,)], {"a": (4, None)}],
    {"$tensor": "no tensor"},
    {"$dict": {"$tuple": [1]}},
    {1: "a", "1": "b", None: "c", 2.5: "d", True + 1: "e"},
    Counter({30: 1, 80: 2}),
    OrderedDict([("b", 1), ("a", 2)]),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_data_comes_back(value: Any) -> None:
    back = round_trip(value)
    assert back == value
    assert type(back) is type(value)


def test_types_inside_come_back() -> None:
    back = round_trip({"a": (1, [2.0]), 3: True})
    assert type(back["a"]) is tuple
    assert type(back["a"][1][0]) is float
    assert back[3] is True
    assert math.isnan(round_trip([math.nan])[0])


def test_tensors_come_back() -> None:
    value = {"a": torch.arange(3), "b": [torch.tensor(0.5)], 1: torch.ones(1), "1": torch.zeros(2)}
    back = round_trip(value)
    assert torch.equal(back["a"], value["a"])
    assert torch.equal(back["b"][0], value["b"][0])
    assert back[1].tolist() == [1.0]
    assert back["1"].tolist() == [0.0, 0.0]


def test_small_tensors_written_out() -> None:
    data, tensors = encode({"lr": torch.tensor(math.inf), "k": torch.tensor([1, 2])}, "group", write_out=True)
    assert not tensors
    back = decode(json.loads(json.dumps(data, allow_nan=False)), {})
    assert back["lr"].dtype == torch.float32
    assert back["lr"].item() == math.inf
    assert back["k"].tolist() == [1, 2]


def test_every_scheduler_of_torch_comes_back() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    lr = torch.optim.lr_scheduler
    made = [
        lr.MultiStepLR(optimizer, [2, 4]),
        lr.CosineAnnealingLR(optimizer, 10),
        lr.OneCycleLR(optimizer, 0.1, 10),
        lr.ReduceLROnPlateau(optimizer),
        lr.SequentialLR(optimizer, [lr.ConstantLR(optimizer), lr.ExponentialLR(optimizer, 0.9)], [3]),
    ]
    for scheduler in made:
        assert round_trip(scheduler.state_dict()) == scheduler.state_dict()


def test_what_cannot_be_stored_is_named_with_its_path() -> None:
    circle: list[Any] = []
    circle.append(circle)
    bad = {
        "hook": print,
        "deep": [{"x": object()}],
        "circle": circle,
        "meta": torch.ones(2, device="meta"),
        ("a", 1): 2,
    }
    with pytest.raises(CheckpointError) as caught:
        encode(bad, "extra")
    text = str(caught.value)
    for said in ("extra/hook is a builtins.builtin", "extra/deep/0/x is a builtins.object"):
        assert said in text
    for said in (
        "extra/circle/0 contains itself",
        "extra/meta is a torch.float32 tensor",
        "a key that is a tuple",
    ):
        assert said in text
