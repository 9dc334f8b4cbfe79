"""Values of parts: blocks of what the whole tensor would have been, wherever that comes from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from cost_models.errors import ModelError
from cost_models.precision import Precision
from partitioner.engine.weights import StateKeys, weights_of
from runtime.mesh.sharding import Block
from runtime.state.rank_state import TensorPart
from tests.support.materialize import materialize

PARTS = {
    "0.weight#0": TensorPart("0.weight", Block((0, 0), (3, 4))),
    "0.weight#1": TensorPart("0.weight", Block((3, 0), (2, 4))),
    "0.bias#0": TensorPart("0.bias", Block((0,), (3,))),
    "0.bias#1": TensorPart("0.bias", Block((3,), (2,))),
    "1.weight#0": TensorPart("1.weight", Block((0, 0), (4, 3))),
    "1.weight#1": TensorPart("1.weight", Block((0, 3), (4, 2))),
    "2.running_mean#0": TensorPart("2.running_mean", Block((0,), (1,))),
    "2.running_mean#1": TensorPart("2.running_mean", Block((1,), (3,))),
}
NAMES = [*PARTS, "1.bias", "2.running_var", "2.num_batches_tracked"]


def make(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4), nn.BatchNorm1d(4))
    model[2].running_mean.normal_()
    return model


def check(found: dict[str, Tensor], whole: dict[str, Tensor]) -> None:
    assert list(found) == NAMES, "under the names that were asked for"
    for name, tensor in found.items():
        expected = PARTS[name].block.of(whole[PARTS[name].whole]) if name in PARTS else whole[name]
        assert torch.equal(tensor, expected), name
        assert tensor.dtype == expected.dtype
        assert tensor.is_contiguous()
        assert tensor.untyped_storage().nbytes() == expected.numel() * expected.itemsize, (
            "no view of the whole"
        )


def test_of_the_model_or_a_state_dict() -> None:
    whole = make().state_dict()
    check(materialize(NAMES, model=make(), parts=PARTS), whole)
    given: dict[str, Any] = {
        name: tensor.double() for name, tensor in whole.items() if tensor.is_floating_point()
    }
    given |= {name: tensor for name, tensor in whole.items() if name not in given}
    check(materialize(NAMES, model=make(1), state_dict=given, parts=PARTS), whole)


def test_of_a_file_by_its_rows(tmp_path: Path) -> None:
    whole = make().state_dict()
    save_file(whole, tmp_path / "model.safetensors")
    model = make(1)
    weights = weights_of(tmp_path, StateKeys.of(model, Precision()), model)
    check(materialize(NAMES, model=model, weights=weights, parts=PARTS), whole)


def test_of_an_init_function_that_draws_the_whole() -> None:
    drawn = []

    def fill(module: nn.Module) -> None:
        drawn.append(module)
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter)
        for buffer in module.buffers(recurse=False):
            buffer.zero_()

    with torch.device("meta"):
        absent = make()
    whole = materialize(list(absent.state_dict()), model=absent, init_fn=fill)
    drawn.clear()
    check(materialize(NAMES, model=absent, init_fn=fill, parts=PARTS), whole)
    assert len(drawn) == 3, "each submodule once, for all parts of its tensors"


def test_a_tensor_without_values_is_named_once_by_its_own_name() -> None:
    with torch.device("meta"):
        absent = make()
    with pytest.raises(ModelError) as caught:
        materialize(["0.weight#0", "0.weight#1"], model=absent, parts=PARTS)
    (because,) = caught.value.because
    assert because.startswith("0.weight is on the meta device")
