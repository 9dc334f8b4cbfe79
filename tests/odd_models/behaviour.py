"""What models do beside computing: parametrizations, checkpointing, hooks, custom functions, control flow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.odd_models.case import Case, Ready, floats, model, odd, squared, whole


def chain(m: Any, x: Tensor) -> Tensor:
    return m.c(m.b(m.a(x).tanh()).tanh())


def _changed(change: Callable[[Any], Any], run: Callable[..., Any] = chain, **options: Any) -> Case:
    """The three layers, after ``change(model)``."""

    def make() -> Ready:
        net = odd(run, **{name: nn.Linear(6, 6) for name in "abc"})
        change(net)
        return Ready(net, floats(6), squared)

    return Case(make, **options)


class _Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).mT

    def right_inverse(self, w: Tensor) -> Tensor:
        return w.triu()


class _Twice(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b

    def right_inverse(self, w: Tensor) -> tuple[Tensor, Tensor]:
        return w, torch.ones_like(w)


def _tied_parametrized(m: Any) -> None:
    m.b.weight = m.a.weight
    parametrize.register_parametrization(m.a, "weight", _Symmetric())


PARAMETRIZATIONS = {
    "weight_norm": _changed(lambda m: parametrizations.weight_norm(m.b, dim=0)),
    "weight_norm of old": _changed(lambda m: nn.utils.weight_norm(m.b)),
    "spectral_norm": _changed(lambda m: parametrizations.spectral_norm(m.b)),
    "spectral_norm of old": _changed(lambda m: nn.utils.spectral_norm(m.b)),
    "orthogonal, exponential": _changed(
        lambda m: parametrizations.orthogonal(m.b, orthogonal_map="matrix_exp")
    ),
    "orthogonal, householder": _changed(
        lambda m: parametrizations.orthogonal(m.b, orthogonal_map="householder")
    ),
    "orthogonal, cayley": _changed(
        lambda m: parametrizations.orthogonal(m.b, orthogonal_map="cayley", use_trivialization=False)
    ),
    "symmetric": _changed(lambda m: parametrize.register_parametrization(m.b, "weight", _Symmetric())),
    "from two originals": _changed(lambda m: parametrize.register_parametrization(m.b, "weight", _Twice())),
    "tied and parametrized": _changed(_tied_parametrized),
    "pruned": _changed(lambda m: prune.l1_unstructured(m.b, "weight", 0.5)),
    "weights of a function": _changed(
        lambda m: None, lambda m, x: F.linear(m.a(x), m.b.weight.softmax(0) @ m.c.weight, m.b.bias)
    ),
    "ParameterList and Dict": model(
        lambda m, x: sum(x * p for p in m.l) * m.d["k"] + m.a(x),
        parts=lambda: {
            "l": nn.ParameterList([nn.Parameter(torch.randn(6)) for _ in range(3)]),
            "d": nn.ParameterDict({"k": nn.Parameter(torch.randn(1))}),
        },
    ),
    "ModuleDict by name": model(
        lambda m, x: m.d["up"](m.d["odd name"](x)).tanh(),
        parts=lambda: {"d": nn.ModuleDict({"up": nn.Linear(6, 6), "odd name": nn.Linear(6, 6)})},
    ),
    "a parameter of one number": model(
        lambda m, x: chain(m, x) ** 2 * m.s, parts=lambda: {"s": nn.Parameter(torch.tensor(2.0))}
    ),
    "an empty parameter": model(
        lambda m, x: chain(m, x) + m.s.sum(), parts=lambda: {"s": nn.Parameter(torch.zeros(0, 3))}
    ),
    "a frozen middle": _changed(lambda m: m.b.requires_grad_(False)),
    "some never used": model(chain, parts=lambda: {"unused": nn.Linear(3, 3)}),
    "one layer three times": _changed(lambda m: None, lambda m, x: m.a(m.a(m.a(x).tanh()).tanh())),
    "a shared bias": _changed(lambda m: setattr(m.b, "bias", m.a.bias)),
    "functional_call": _changed(
        lambda m: None, lambda m, x: torch.func.functional_call(m.a, {"weight": m.b.weight * 2}, (m.c(x),))
    ),
}

QUANTIZATION = {
    "fake quantization": _changed(
        lambda m: None, lambda m, x: m.b(torch.fake_quantize_per_tensor_affine(m.a(x), 0.1, 0, -128, 127))
    ),
    "fake quantization by channel": _changed(
        lambda m: None,
        lambda m, x: F.linear(
            m.a(x),
            torch.fake_quantize_per_channel_affine(
                m.b.weight.float(),
                torch.full((6,), 0.1, dtype=torch.float32),
                torch.zeros(6, dtype=torch.int32),
                0,
                -128,
                127,
            ).double(),
        ),
        tolerance=1e-5,
    ),
    "quantization stubs": model(
        lambda m, x: m.d(m.b(m.q(m.a(x)))),
        parts=lambda: {"q": torch.ao.quantization.QuantStub(), "d": torch.ao.quantization.DeQuantStub()},
    ),
    "FakeQuantize with observer": model(
        lambda m, x: m.b(m.q(m.a(x).float()).double()),
        parts=lambda: {"q": torch.ao.quantization.FakeQuantize().float()},
        tolerance=1e-5,
    ),
    "binarized, straight through": _changed(
        lambda m: None, lambda m, x: m.b(m.a(x) + (m.a(x).sign() - m.a(x)).detach())
    ),
    ".data of an activation": _changed(lambda m: None, lambda m, x: m.b(x / m.a(x).data.exp()) * m.a(x)),
    ".data of a parameter": _changed(lambda m: None, lambda m, x: m.b(m.a(x)) / m.a.weight.data.norm()),
}


def _reentrant(m: Any, x: Tensor) -> Tensor:
    return m.c(checkpoint(lambda y: m.b(y).tanh(), m.a(x), use_reentrant=True))


CHECKPOINTING = {
    "checkpoint": _changed(
        lambda m: None, lambda m, x: m.c(checkpoint(lambda y: m.b(y).tanh(), m.a(x), use_reentrant=False))
    ),
    "checkpoint, reentrant": _changed(lambda m: None, _reentrant),
    "checkpoint of everything": _changed(
        lambda m: None, lambda m, x: checkpoint(lambda y: chain(m, y), x, use_reentrant=False)
    ),
    "checkpoint_sequential": _changed(
        lambda m: None, lambda m, x: checkpoint_sequential([m.a, m.b, m.c], 2, x, use_reentrant=False)
    ),
    "nested checkpoints": _changed(
        lambda m: None,
        lambda m, x: checkpoint(
            lambda y: m.b(checkpoint(lambda z: m.a(z).tanh(), y, use_reentrant=False)), x, use_reentrant=False
        ),
    ),
    "saved_tensors_hooks": _changed(lambda m: None, lambda m, x: _packed_on_cpu(m, x)),
}


def _packed_on_cpu(m: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        return chain(m, x)


def _halved(m: Any, x: Tensor) -> Tensor:
    h = m.a(x)
    if h.requires_grad:
        h.register_hook(lambda g: g * 0.5)
    return m.c(m.b(h).tanh())


def _backward_hook(module: nn.Module, before: Any, after: Any) -> Any:
    return tuple(None if g is None else g * 2 for g in before)


def _halve_gradient(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


HOOKS = {
    "forward hook": _changed(lambda m: m.b.register_forward_hook(lambda mod, args, out: out * 2)),
    "forward pre-hook": _changed(lambda m: m.b.register_forward_pre_hook(lambda mod, args: (args[0] + 1,))),
    "full backward hook": _changed(lambda m: m.b.register_full_backward_hook(_backward_hook)),
    "backward pre-hook": _changed(
        lambda m: m.b.register_full_backward_pre_hook(lambda mod, g: tuple(x * 3 for x in g))
    ),
    "gradient hook of a parameter": _changed(
        lambda m: m.b.weight.register_hook(lambda g: g.clamp(-0.01, 0.01)), whole=True
    ),
    "gradient mask of a parameter": _changed(lambda m: m.a.weight.register_hook(lambda g: g * torch.eye(6))),
    "post-accumulate hook": _changed(
        lambda m: m.b.weight.register_post_accumulate_grad_hook(_halve_gradient), whole=True
    ),
    "gradient hook of a value": _changed(lambda m: None, _halved),
    "gradient hook after freezing": _changed(
        lambda m: (m.a.requires_grad_(False), m.b.weight.register_hook(torch.sign)), whole=True
    ),
}


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, steps: int) -> Tensor:
        ctx.save_for_backward(x)
        return (x * steps).round() / steps

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1), None


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        y = x @ w.T
        ctx.save_for_backward(y, x, w)
        return (y**2).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        y, x, w = ctx.saved_tensors
        g = gradient * 2 * y / y.numel()
        return g @ w, g.T @ x


@torch.library.custom_op("odd_models::cubed", mutates_args=())
def cubed(x: Tensor) -> Tensor:
    """A custom op with a gradient."""
    return x**3


cubed.register_fake(lambda x: torch.empty_like(x))
cubed.register_autograd(
    lambda ctx, g: g * 3 * ctx.saved_tensors[0] ** 2,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)

CUSTOM_FUNCTIONS = {
    "gradient reversal": _changed(lambda m: None, lambda m, x: m.c(_Reversed.apply(m.a(x)) + m.b(x))),
    "straight-through quantizer": _changed(lambda m: None, lambda m, x: m.c(_Step.apply(m.a(x), 4))),
    "fused loss": model(lambda m, x: _FusedLoss.apply(m.a(x).tanh(), m.b.weight), loss=None),
    "custom op": _changed(lambda m: None, lambda m, x: m.c(cubed(m.a(x)) + m.b(x))),
    "double backward inside": _changed(
        lambda m: None, lambda m, x: m.b(torch.func.grad(lambda y: (y**3).sum())(m.a(x)))
    ),
    "vmap": _changed(lambda m: None, lambda m, x: torch.vmap(lambda row: m.b(row).softmax(0))(m.a(x))),
    "jvp": _changed(lambda m: None, lambda m, x: torch.func.jvp(m.b, (m.a(x),), (x,))[1]),
}


def _conditional(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.shape[1] > 3, lambda y: m.a(y).sin(), lambda y: m.b(y).cos(), (x,)) + m.c(x)


def _data_conditional(m: Any, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (m.a(x),)) + m.c(x)


def _while(m: Any, x: Tensor) -> Tensor:
    from torch._higher_order_ops.while_loop import while_loop

    _, y = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y.tanh()), (torch.tensor(0), x.clone()))
    return m.b(y) + m.a(x)


def _scan(m: Any, x: Tensor) -> Tensor:
    from torch._higher_order_ops.scan import scan

    return scan(lambda h, y: (h * 0.5 + y, h + y), torch.zeros_like(m.a(x)[:, 0]), m.a(x), dim=1)[1]


def _branch_on_data(m: Any, x: Tensor) -> Tensor:
    return m.a(x) if x.sum() > 1e6 else m.b(m.c(x))


CONTROL_FLOW = {
    "loop over shapes": _changed(
        lambda m: None, lambda m, x: sum(m.a(x) * (i / 20) for i in range(x.shape[1]))
    ),
    "branch on data": _changed(lambda m: None, _branch_on_data),
    "loop until converged": _changed(lambda m: None, lambda m, x: _until(m, x)),
    "cond on a shape": _changed(lambda m: None, _conditional),
    "cond on data": _changed(lambda m: None, _data_conditional),
    "while_loop": _changed(lambda m: None, _while),
    "scan": model(_scan, floats(4, 6)),
    "branch on training": _changed(lambda m: None, lambda m, x: m.b(m.a(x)) if m.training else m.c(x)),
    "item in forward": _changed(
        lambda m: None, lambda m, x: m.b(m.a(x)) * float(x.shape[1]) + x.detach().max().item() * 0
    ),
    "no_grad and enable_grad": _changed(lambda m: None, lambda m, x: m.b(m.a(x)) + _target(m, x)),
    "inference_mode target": _changed(lambda m: None, lambda m, x: m.b(m.a(x)) - m.c(x).detach()),
    "stack of 40 layers": whole(
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(40))), floats(4)
    ),
}


def _target(m: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        y = m.c(x)
        with torch.enable_grad():
            return y * m.a.bias


def _until(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    while float(y.abs().max()) > 0.5:
        y = y * 0.5
    return m.b(y)


CHAPTERS = {
    "parametrizations": PARAMETRIZATIONS,
    "quantization": QUANTIZATION,
    "checkpointing": CHECKPOINTING,
    "hooks": HOOKS,
    "custom functions": CUSTOM_FUNCTIONS,
    "control flow": CONTROL_FLOW,
}
