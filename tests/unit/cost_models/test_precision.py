"""Which type each tensor of a parameter has, as the table in the module says, and what is refused."""

from __future__ import annotations

import pytest
import torch

from cost_models.errors import UsageError
from cost_models.precision import NAMES, ParameterPrecision, Precision

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("own", "precision", "leaf", "stored", "owner", "gradient"),
    [
        (F32, Precision(), F32, F32, F32, F32),
        (F32, Precision(compute=BF16), BF16, F32, F32, F32),
        (BF16, Precision(), BF16, BF16, BF16, F32),
        (BF16, Precision(gradients=BF16), BF16, BF16, BF16, BF16),
        (BF16, Precision(master=F32), BF16, BF16, F32, F32),
        (F32, Precision(parameters=BF16, master=F32), BF16, BF16, F32, F32),
        (F32, Precision(compute=F16, loss_scale="dynamic"), F16, F32, F32, F32),
        (F16, Precision(master=F32, loss_scale="dynamic"), F16, F16, F32, F32),
        (F64, Precision(), F64, F64, F64, F64),
        (F64, Precision(master=F32), F64, F64, F64, F64),  # not wider: there is nothing to keep
        (BF16, Precision(compute=F32), F32, BF16, BF16, F32),
    ],
)
def test_the_table(own, precision, leaf, stored, owner, gradient):
    assert precision.of(own) == ParameterPrecision(leaf, stored, owner, gradient)


def test_frozen_parameters_have_no_master_and_batch_norms_keep_their_type():
    precision = Precision(compute=BF16, master=F64)
    assert precision.of(F32).owner == F64
    assert precision.of(F32, trains=False) == ParameterPrecision(BF16, F32, F32, F32)
    assert precision.of(F32, keeps_dtype=True).leaf == F32
    assert Precision(parameters=BF16).of(F32, keeps_dtype=True) == ParameterPrecision.plain(F32)


@pytest.mark.parametrize("own", [torch.int64, torch.bool, torch.complex64])
def test_what_is_not_floating_point_keeps_its_type(own):
    precision = Precision(compute=BF16, parameters=BF16, master=F32)
    assert precision.of(own) == ParameterPrecision.plain(own)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"compute": torch.int8}, "compute is torch.int8"),
        ({"parameters": torch.float8_e4m3fn}, "parameters is torch.float8_e4m3fn"),
        ({"master": torch.complex64}, "master is torch.complex64"),
        ({"compute": "bf16"}, "compute is 'bf16'"),
        ({"compute": 16}, "compute is 16"),
        ({"master": BF16}, "keep no more than 16-bit parameters do"),
        ({"master": F32, "parameters": F64}, "master=float32 is narrower than parameters=float64"),
        ({"master": F32, "compute": F64}, "master=float32 is narrower than compute=float64"),
        ({"loss_scale": 128.0}, "loss_scale is 128.0"),
        ({"gradients": F16}, 'need loss_scale="dynamic"'),
    ],
)
def test_nonsense_is_refused(fields, reason):
    with pytest.raises(UsageError) as error:
        Precision(**fields)
    assert reason in str(error.value)


def test_every_problem_is_named_at_once():
    with pytest.raises(UsageError) as error:
        Precision(compute=torch.int8, master=torch.bool, loss_scale="static")  # type: ignore[arg-type]
    assert len(error.value.because) == 3


def test_fields_come_back():
    precision = Precision(compute=BF16, parameters=F32, gradients=F32, master=F64, loss_scale="dynamic")
    assert Precision.from_fields(precision.fields()) == precision
    assert Precision.from_fields({}) == Precision()
    assert Precision.from_fields({"compute": "bf16", "master": "fp32"}) == Precision(compute=BF16, master=F32)
    assert str(Precision()) == "the model's own"


def test_unknown_fields_and_words_are_refused():
    with pytest.raises(UsageError) as error:
        Precision.from_fields({"computer": "bf16", "master": "double", "loss_scale": "static"})
    assert len(error.value.because) == 3


def test_names_are_what_torch_calls_them():
    assert all(getattr(torch, name) is dtype for dtype, name in NAMES.items())
