"""Values for parameters and buffers: from the model, a state dict, a rebuilt submodule, an init function."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import Tensor, nn

from cost_models.errors import ModelError
from partitioner.models.hugging_face import build
from passes.trace.names import state_names
from runtime.mesh.sharding import Block
from tests.support.materialize import materialize
from tests.support.traced_models import small


def every_name(model: nn.Module) -> list[str]:
    names = state_names(model)
    return [*names.parameters, *names.buffers]


def test_only_what_is_asked_for_and_never_the_models_own_tensor() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    result = materialize(["0.weight", "1.running_mean"], model=model)
    assert list(result) == ["0.weight", "1.running_mean"]
    assert torch.equal(result["0.weight"], model[0].weight)
    result["0.weight"].zero_()
    assert model[0].weight.abs().sum() > 0
    assert not result["0.weight"].requires_grad


def test_of_many_names_without_a_value_a_few_are_listed_and_all_counted() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(50)])
    with pytest.raises(ModelError, match="100 of 100 parameters and buffers have no values") as error:
        materialize(every_name(model), model=model)
    assert len(error.value.because) == 11
    assert error.value.because[-1] == "and 90 more"


def test_a_meta_llama_computes_like_the_real_one_from_its_state_dict() -> None:
    """No state dict holds ``inv_freq``: it is recomputed."""
    real = small("llama-1b").model
    twin = build(type(real), real.config, torch.float64, on_meta=True)
    state = real.state_dict()
    assert "model.rotary_emb.inv_freq" not in state
    assert twin.model.rotary_emb.inv_freq.is_meta
    result = materialize(every_name(twin), model=twin, state_dict=state)
    buffers = dict(real.named_buffers())
    assert set(buffers) <= set(result)
    for name, value in [*real.named_parameters(), *buffers.items()]:
        assert value.dtype == result[name].dtype
        torch.testing.assert_close(result[name], value.detach(), rtol=0, atol=0)
    assert twin.model.rotary_emb.inv_freq.is_meta


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5", "whisper", "vit", "mixtral"])
def test_every_bundled_model_gets_all_its_state_on_meta(name: str) -> None:
    real = small(name).model
    twin = build(type(real), real.config, torch.float64, on_meta=True)
    result = materialize(every_name(twin), model=twin, state_dict=real.state_dict())
    for buffer, value in real.named_buffers():
        torch.testing.assert_close(result[buffer], value, rtol=0, atol=0)


def test_a_state_dict_may_use_the_alias() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2, bias=False)
            self.b = nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight

    with torch.device("meta"):
        model = Tied()
    value = torch.randn(2, 2)
    assert torch.equal(
        materialize(["a.weight"], model=model, state_dict={"b.weight": value})["a.weight"], value
    )
    assert torch.equal(
        materialize(["b.weight"], model=model, state_dict={"a.weight": value})["b.weight"], value
    )


def reset(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.BatchNorm1d):
        module.reset_parameters()


def test_an_init_function_gives_every_rank_the_same_numbers() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    whole = materialize(every_name(model), model=model, init_fn=reset)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    alone = materialize(["2.bias", "2.weight"], model=model, init_fn=reset)
    assert torch.equal(whole["2.weight"], alone["2.weight"])
    assert torch.equal(whole["2.bias"], alone["2.bias"])
    assert not torch.equal(whole["0.weight"], whole["2.weight"])
    assert torch.equal(whole["1.running_var"], torch.ones(3))
    other = materialize(["2.weight"], model=model, init_fn=reset, seed=1)
    assert not torch.equal(other["2.weight"], whole["2.weight"])
    assert all(p.is_meta for p in model.parameters())


def test_what_stays_without_a_value_is_named_all_at_once() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("table", torch.ones(2), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return x

    with torch.device("meta"):
        model = Own()
    with pytest.raises(ModelError) as caught:
        materialize(["linear.weight", "table", "nothing"], model=model)
    text = "\n".join(caught.value.because)
    assert len(caught.value.because) == 3
    assert all(name in text for name in ("linear.weight", "table", "nothing"))
    with pytest.raises(ModelError, match="leaves it unset"):
        materialize(["table"], model=model, init_fn=reset)
    with pytest.raises(ModelError, match="no model was given"):
        materialize(["table"], state_dict={})


def test_a_state_dict_of_another_shape_is_refused() -> None:
    with pytest.raises(ModelError, match=r"\(3, 3\).*\(2, 2\)"):
        materialize(["weight"], model=nn.Linear(2, 2), state_dict={"weight": torch.zeros(3, 3)})


def test_names_that_the_model_does_not_have_are_refused_and_missing_ones_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As torch's strict loading: with the names of a wrapped model, all would silently stay as it was."""
    model = nn.Linear(2, 2)
    wrapped = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match=r"_orig_mod\.weight, _orig_mod\.bias"):
        materialize(["weight"], model=model, state_dict=wrapped)
    with caplog.at_level("WARNING", "partitioner"):
        materialize(["weight"], model=model, state_dict=dict(model.state_dict()))
        assert not caplog.records
        materialize(["weight"], model=model, state_dict={"weight": torch.ones(2, 2)})
    assert [record.getMessage() for record in caplog.records] == [
        "state_dict= lacks bias: what the model or init_fn has there is trained on"
    ]


def test_blocks_are_cut_out_of_what_the_model_a_state_dict_and_init_fn_have() -> None:
    blocks = {
        "0.weight": Block((2, 0), (2, 3)),
        "1.weight": Block((0, 1), (5, 2)),
        "1.bias": Block((4,), (1,)),
    }

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))

    real = make()
    for given in (
        {"model": real},
        {"model": make(), "state_dict": {n: t.double() for n, t in real.state_dict().items()}},
    ):
        found = materialize(every_name(real), blocks=blocks, **given)
        for name, whole in real.state_dict().items():
            expected = blocks[name].of(whole) if name in blocks else whole
            assert torch.equal(found[name], expected)
            assert found[name].dtype == whole.dtype
            assert found[name].is_contiguous()
            assert found[name].untyped_storage().nbytes() == expected.numel() * 4, "no view of the whole"
    with torch.device("meta"):
        absent = make()

    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.normal_(parameter)

    whole = materialize(every_name(absent), model=absent, init_fn=fill)
    parts = materialize(every_name(absent), model=absent, init_fn=fill, blocks=blocks)
    for name, block in blocks.items():
        assert torch.equal(parts[name], block.of(whole[name])), "the numbers of the whole"


def test_a_drawn_submodule_is_there_for_as_long_as_one_of_its_names_is_asked_for() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
    alive: list[weakref.ref[nn.Module]] = []
    most = 0

    def fill(module: nn.Module) -> None:
        nonlocal most
        alive.append(weakref.ref(module))
        most = max(most, sum(ref() is not None for ref in alive))
        for parameter in module.parameters(recurse=False):
            nn.init.ones_(parameter)

    materialize(every_name(model), model=model, init_fn=fill)
    assert (len(alive), most) == (4, 1)
