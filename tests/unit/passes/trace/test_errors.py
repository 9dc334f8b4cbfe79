"""Models that cannot be traced: the error names module, file, line and what to change."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cost_models.errors import ModelError, UsageError
from passes.trace.trace import trace


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:  # the line the error must quote
            return x * 2
        return x


class Picking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x > 0].sum()


class Numpy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum() * float(x.detach().numpy().max())


def inside(module: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(module))


def mean_loss(output: Tensor, batch: object) -> Tensor:
    return output.mean()


def failure(model: nn.Module, batch: object = None, **options: object) -> ModelError:
    with pytest.raises(ModelError) as caught:
        trace(model, torch.randn(2, 4) if batch is None else batch, **options)  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) < 12
    return caught.value


def test_data_dependent_control_flow() -> None:
    error = failure(Branching(), loss_fn=mean_loss)
    assert "in Branching.forward" in error.because[0]
    assert "test_errors.py:" in error.because[0]
    assert "if x.sum() > 0" in error.because[0]
    assert any("torch.where" in text for text in error.suggestions)


def test_sizes_that_depend_on_numbers() -> None:
    error = failure(Picking(), loss_fn=lambda output, batch: output)
    assert "test_errors.py:" in " ".join(error.because)
    assert any("mask" in text or "torch.where" in text for text in error.suggestions)


def test_code_that_export_cannot_see_through() -> None:
    error = failure(Numpy(), loss_fn=mean_loss)
    assert "test_errors.py:" in error.because[0]


@pytest.mark.parametrize("part", [Branching(), Picking(), Numpy()], ids=lambda part: type(part).__name__)
def test_inside_a_larger_model_such_code_is_one_opaque_op(part: nn.Module) -> None:
    graph = trace(inside(part), torch.randn(2, 4), loss_fn=mean_loss)
    (note,) = (note for note in graph.notes if "opaque op" in note)
    assert note.startswith(f"module '1.0' ({type(part).__name__}) runs whole")
    assert "test_errors.py:" in note


def test_inputs_that_do_not_fit() -> None:
    error = failure(nn.Sequential(nn.Linear(7, 2)), loss_fn=mean_loss)
    assert "module '0' (Linear)" in error.because[0]
    assert any("example_inputs" in text for text in error.suggestions)


def test_a_fault_in_the_loss_function() -> None:
    error = failure(nn.Linear(4, 2), loss_fn=lambda output, batch: F.cross_entropy(output, batch["missing"]))
    assert "test_errors.py:" in " ".join(error.because)


def test_missing_and_unusable_losses() -> None:
    assert "no loss" in failure(nn.Linear(4, 2)).what
    vector = failure(nn.Linear(4, 2), loss_fn=lambda output, batch: output.sum(1))
    assert "(2,)" in vector.because[0] or "shape" in vector.because[0]
    assert "does not return a loss" in failure(nn.Linear(4, 2), loss_fn=lambda output, batch: None).what


def test_batches_that_do_not_fit_forward() -> None:
    assert "needs input" in failure(nn.Linear(4, 2), {"wrong": torch.zeros(2, 4)}, loss_fn=mean_loss).what
    assert "does not fit" in failure(nn.Linear(4, 2), (torch.zeros(2, 4), torch.zeros(2))).what
    assert "holds no tensor" in failure(nn.Linear(4, 2), {"input": 3}).because[0]


def test_a_tuple_whose_split_is_a_guess_is_refused() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return x if mask is None else x * mask

    assert "cannot tell" in failure(Masked(), (torch.zeros(2, 4), torch.zeros(2, 4)), loss_fn=mean_loss).what


def test_a_compiled_model_is_taken_out_of_its_wrapper_with_a_note() -> None:
    inner = nn.Linear(4, 2)
    compiled: nn.Module = torch.compile(inner)
    graph = trace(compiled, torch.zeros(2, 4), loss_fn=mean_loss)
    assert list(graph.parameters) == ["weight", "bias"]
    assert graph.model_name == "Linear"
    assert any("the model was compiled" in note for note in graph.notes)
    assert graph.fingerprint == trace(inner, torch.zeros(2, 4), loss_fn=mean_loss).fingerprint


def test_wrappers_are_to_be_taken_off() -> None:
    inner = nn.Linear(4, 2)
    assert "pass model.module" in failure(nn.DataParallel(inner), loss_fn=mean_loss).suggestions
    assert "TorchScript" in failure(torch.jit.script(inner), loss_fn=mean_loss).what
    assert "module '1' was scripted" in str(
        failure(nn.Sequential(inner, torch.jit.script(inner)), loss_fn=mean_loss)
    )
    with pytest.raises(UsageError, match=r"no torch\.nn\.Module"):
        trace(mean_loss, torch.zeros(2, 4))  # type: ignore[arg-type]


def test_a_buffer_of_another_shape_cannot_replace_one() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            self.table = torch.ones(4)
            return (x * self.table).mean()

    assert "buffer table by one of another shape" in failure(Growing()).what


def test_a_loss_function_with_parameters_of_its_own() -> None:
    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, output: Tensor, batch: object) -> Tensor:
            return (output * self.scale).mean()

    assert "loss_fn.scale" in failure(nn.Linear(4, 2), loss_fn=Learned()).what


def test_a_plain_meta_attribute_has_no_values() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.table = torch.ones(4)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * self.table).mean()

    with torch.device("meta"):
        model = Plain()
    error = failure(model)
    assert "table" in error.because[0]
    assert any("register_buffer" in text for text in error.suggestions)


def test_options_that_name_no_leaf_are_usage_errors_with_all_problems() -> None:
    with pytest.raises(UsageError) as caught:
        trace(nn.Linear(4, 2), torch.zeros(2, 4), loss_fn=mean_loss, batch_dims={"x": 0, "input": 5})
    assert len(caught.value.because) == 2
    with pytest.raises(UsageError, match="dynamic_dims"):
        trace(nn.Linear(4, 2), torch.zeros(2, 4), loss_fn=mean_loss, dynamic_dims={"input": [3]})


def test_a_module_that_fixes_a_size_that_is_to_stay_open_is_the_way_out() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = self.lstm(x)[0]
            return made

    options = {"loss_fn": mean_loss, "dynamic_dims": {"x": [1]}}
    error = failure(Recurrent(), torch.randn(3, 5, 4), **options)
    assert "dimension 1 of x at 5, in test_errors.py:" in error.because[0]
    assert "of module 'lstm'" in error.because[0]
    assert error.suggestions[0].startswith("opaque=['lstm']")
    trace(Recurrent(), torch.randn(3, 5, 4), opaque=["lstm"], **options)  # type: ignore[arg-type]
