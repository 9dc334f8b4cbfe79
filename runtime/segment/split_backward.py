"""Cut a segment's backward in two: input gradients now, weight gradients later.

Zero-bubble schedules send a stage's input gradients upstream before they compute its weight gradients.
``split`` rewrites the parameterized ops of a segment's graph to autograd functions whose backward returns
the input gradient at once and queues ``(input, output gradient)``, from which the weight gradient is
computed when asked for.

    before   linear = torch.ops.aten.linear.default(x, weight, bias)
    after    linear = split_linear(x, weight, bias)

Rewritten ops: linear, mm, matmul, bmm, addmm and convolutions whose weight is a parameter (or its
transpose), and embedding. A bias that is made of parameters (on one rank of several it is added, on others zeros) has its
gradient at once. Any other use of a parameter, of a tied one too, keeps its ordinary autograd
node: its gradient is then computed together with the input gradients and summed into the same ``.grad``, so
the result is right whatever is covered. Hooks on parameters do not see the deferred part.

Extra memory: the output gradients of the deferred ops, between the two halves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

from runtime.segment.code import SegmentCode
from runtime.state.precision import gradient_dtype

aten = torch.ops.aten

WeightWork: TypeAlias = tuple["SplitRule", Tensor, Tensor | None, Tensor, Tensor]
"""A weight gradient to compute: (rule, weight, bias, input, output gradient)."""


@dataclass
class DeferredWork:
    """The queue in which a segment's split ops put their weight work; where ``items`` is None they do it at once."""

    items: list[WeightWork] | None = field(default=None)


def run_deferred(items: list[WeightWork]) -> None:
    """Compute the queued weight gradients into ``.grad``; each entry is freed as soon as it is done."""
    with torch.no_grad():
        items.reverse()
        while items:
            rule, weight, bias, x, grad = items.pop()
            rule.accumulate(weight, bias, x, grad)


@dataclass(frozen=True)
class SplitRule:
    """The rule by which one op's input and weight gradients are computed apart.

    ``applies`` decides on the real tensors, because a graph may come without shapes.
    """

    name: str
    applies: Callable[[Tensor, Tensor], bool]
    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    input_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Function from (output gradient, weight, input) to the input gradient."""
    accumulate: Callable[[Tensor, Tensor | None, Tensor, Tensor], None]
    """Function of (weight, bias, input, output gradient) that adds to ``weight.grad`` and ``bias.grad``."""


class _SplitOp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rule: SplitRule,
        deferred: DeferredWork,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        made_bias: bool,
    ) -> Tensor:
        """Run the op. ``made_bias``: the bias comes from other ops, which get its gradient at once."""
        ctx.rule, ctx.deferred = rule, deferred
        # Parameters as they are: inside a recomputed block autograd hands out detached copies of what it saved.
        ctx.weight, ctx.bias = weight, None if made_bias else bias
        ctx.made_shape = bias.shape if made_bias and bias is not None else None
        ctx.save_for_backward(x)
        return rule.forward(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        (x,) = ctx.saved_tensors
        weight, bias = ctx.weight, ctx.bias
        _, _, x_needs, weight_needs, bias_needs, _ = ctx.needs_input_grad
        rule, deferred = ctx.rule, ctx.deferred
        x_grad = rule.input_gradient(grad, weight, x) if x_needs else None
        bias_grad = grad.sum_to_size(ctx.made_shape) if bias_needs and ctx.made_shape is not None else None
        if weight_needs or (bias_needs and bias is not None):
            work = (rule, weight, bias, x, grad)
            if deferred.items is None:
                run_deferred([work])
            else:
                deferred.items.append(work)
        return None, None, x_grad, None, bias_grad, None


def _add_gradient(parameter: Tensor | None, gradient: Callable[[], Tensor]) -> None:
    if parameter is None or not parameter.requires_grad:
        return
    if parameter.grad is None:
        parameter.grad = gradient().to(gradient_dtype(parameter))
    elif parameter.grad.is_sparse:  # of a sparse embedding; only dense + sparse is defined
        parameter.grad = gradient().to(gradient_dtype(parameter)) + parameter.grad
    else:
        parameter.grad += gradient()


# ----------------------------------------------------------------------------------------------------
# x @ W + b. x: [..., in], grad: [..., out]; W: [out, in] where transposed (as in linear), else [in, out].


def _affine(transposed: bool, forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> SplitRule:
    def input_gradient(grad: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        return grad.matmul(weight if transposed else weight.t())

    def accumulate(weight: Tensor, bias: Tensor | None, x: Tensor, grad: Tensor) -> None:
        grad = grad.reshape(-1, grad.shape[-1])
        if weight.requires_grad:
            x = x.reshape(-1, x.shape[-1])
            left, right = (grad.t(), x) if transposed else (x.t(), grad)
            if weight.grad is None or weight.grad.is_sparse or weight.grad.dtype != grad.dtype:
                _add_gradient(weight, lambda: left.mm(right))
            else:  # no temporary for the sum
                weight.grad.addmm_(left, right)
        _add_gradient(bias, lambda: grad.sum(0))

    def applies(x: Tensor, weight: Tensor) -> bool:
        return weight.dim() == 2 and x.dim() >= 1

    return SplitRule("affine", applies, forward, input_gradient, accumulate)


def _with_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias


LINEAR = _affine(True, lambda x, w, b: torch.nn.functional.linear(x, w, b))
MATMUL = _affine(False, lambda x, w, b: _with_bias(torch.matmul(x, w), b))
MATMUL_T = _affine(True, lambda x, w, b: _with_bias(torch.matmul(x, w.t()), b))
ADDMM = _affine(False, lambda x, w, b: torch.addmm(b, x, w) if b is not None else torch.mm(x, w))
ADDMM_T = _affine(True, lambda x, w, b: torch.addmm(b, x, w.t()) if b is not None else torch.mm(x, w.t()))


def _accumulate_bmm(weight: Tensor, bias: Tensor | None, x: Tensor, grad: Tensor) -> None:
    if weight.grad is None or weight.grad.dtype != grad.dtype:
        _add_gradient(weight, lambda: x.transpose(1, 2).bmm(grad))
    else:
        weight.grad.baddbmm_(x.transpose(1, 2), grad)


BMM = SplitRule(
    "bmm",
    lambda x, weight: True,
    lambda x, weight, bias: torch.bmm(x, weight),
    lambda grad, weight, x: grad.bmm(weight.transpose(1, 2)),
    _accumulate_bmm,
)


def _embedding(
    padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> SplitRule | None:
    if sparse:
        return None

    def accumulate(weight: Tensor, bias: Tensor | None, ids: Tensor, grad: Tensor) -> None:
        rows = weight.shape[0]
        _add_gradient(
            weight, lambda: aten.embedding_dense_backward(grad, ids, rows, padding_idx, scale_grad_by_freq)
        )

    return SplitRule(
        "embedding",
        lambda ids, weight: True,
        lambda ids, weight, bias: aten.embedding(weight, ids, padding_idx, scale_grad_by_freq),
        lambda grad, weight, ids: grad,  # never asked for: ids are integers
        accumulate,
    )


def _convolution(
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    transposed: bool = False,
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
) -> SplitRule:
    """Make the rule of x [batch, in, *space], W [out, in / groups, *window]; unbatched inputs keep ordinary autograd."""

    def arguments(weight: Tensor) -> tuple[object, ...]:
        space = weight.dim() - 2
        wide = [
            list(v) * space if len(v) == 1 else list(v) for v in (stride, padding, dilation, output_padding)
        ]
        return wide[0], wide[1], wide[2], transposed, wide[3], groups

    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dim() < weight.dim():
            return forward(x.unsqueeze(0), weight, bias).squeeze(0)
        result: Tensor = aten.convolution(x, weight, bias, *arguments(weight))
        return result

    def input_gradient(grad: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        mask = [True, False, False]
        result: Tensor = aten.convolution_backward(grad, x, weight, None, *arguments(weight), mask)[0]
        return result

    def accumulate(weight: Tensor, bias: Tensor | None, x: Tensor, grad: Tensor) -> None:
        mask = [False, weight.requires_grad, bias is not None and bias.requires_grad]
        sizes = None if bias is None else list(bias.shape)
        _, for_weight, for_bias = aten.convolution_backward(grad, x, weight, sizes, *arguments(weight), mask)
        _add_gradient(weight, lambda: for_weight)
        _add_gradient(bias, lambda: for_bias)

    def applies(x: Tensor, weight: Tensor) -> bool:
        return x.dim() == weight.dim()

    return SplitRule("convolution", applies, forward, input_gradient, accumulate)


# ----------------------------------------------------------------------------------------------------
# Finding the ops in a graph.


@dataclass(frozen=True)
class Site:
    """A node that can be split: its rule and the nodes of its input, weight and bias."""

    rule: SplitRule
    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    made_bias: bool
    """The bias is no parameter but made of some: its gradient is not deferred."""


def find_site(node: fx.Node, parameters: Mapping[fx.Node, str]) -> Site | None:
    """Return the site that ``node`` is, or None where it keeps its ordinary autograd.

    ``parameters``: the placeholders that stand for parameters.
    """
    if node.op != "call_function" or node.kwargs:
        return None
    target, args = node.target, node.args
    if target is aten.linear.default:
        return _site(parameters, LINEAR, None, args[0], args[1], args[2] if len(args) > 2 else None)
    if target in (aten.matmul.default, aten.mm.default, operator.matmul):
        return _site(parameters, MATMUL, MATMUL_T, args[0], args[1], None)
    if target is aten.addmm.default:
        return _site(parameters, ADDMM, ADDMM_T, args[1], args[2], args[0])
    if target is aten.bmm.default:
        return _site(parameters, BMM, None, args[0], args[1], None)
    if target is aten.embedding.default:
        rule = _embedding(*args[2:])  # type: ignore[arg-type]
        return _site(parameters, rule, None, args[1], args[0], None)
    if target in (aten.conv1d.default, aten.conv2d.default, aten.conv3d.default):
        options: list[Any] = [(1,), (0,), (1,), 1]
        given = args[3:]
        options[: len(given)] = given
        stride, padding, dilation, groups = options
        rule = _convolution(stride, padding, dilation, False, (0,), groups)
        return _site(parameters, rule, None, args[0], args[1], args[2] if len(args) > 2 else None)
    if target is aten.convolution.default:
        return _site(parameters, _convolution(*args[3:]), None, *args[:3])  # type: ignore[arg-type]
    return None


def _site(
    parameters: Mapping[fx.Node, str],
    rule: SplitRule | None,
    rule_t: SplitRule | None,
    x: object,
    weight: object,
    bias: object,
) -> Site | None:
    if not isinstance(x, fx.Node) or not isinstance(weight, fx.Node) or rule is None:
        return None
    made_bias = bias is not None and bias not in parameters
    if made_bias and not (isinstance(bias, fx.Node) and rule.name == "affine"):
        return None
    if weight not in parameters:
        source = _transposed(weight)
        if source is None or source not in parameters or rule_t is None:
            return None
        rule, weight = rule_t, source
    if x in parameters:  # both gradients would be weight gradients
        return None
    return Site(rule, x, weight, bias if isinstance(bias, fx.Node) else None, made_bias)


_TRANSPOSES = (aten.t.default, aten.transpose.int, aten.permute.default)


def _transposed(node: fx.Node) -> fx.Node | None:
    """Return the node that ``node`` is the two-dimensional transpose of."""
    is_t = node.target is aten.t.default
    is_transpose = node.target is aten.transpose.int and set(node.args[1:]) in ({0, 1}, {-1, -2})
    is_permute = node.target is aten.permute.default and node.args[1] in ([1, 0], (1, 0))
    if is_t or is_transpose or is_permute:
        return node.args[0]  # type: ignore[return-value]
    return None


def split(module: fx.GraphModule, code: SegmentCode) -> tuple[fx.GraphModule, DeferredWork]:
    """Return a copy of ``module`` whose parameterized ops defer their weight gradients into the returned queue."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, val_map={}))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    parameters = {
        node: i.name for node, i in zip(placeholders, code.inputs, strict=True) if i.kind == "parameter"
    }
    deferred = DeferredWork()
    for node in list(graph.nodes):
        site = find_site(node, parameters)
        if site is None:
            continue
        with graph.inserting_before(node):
            replacement = graph.call_function(
                _call(site.rule, deferred, site.made_bias), (site.x, site.weight, site.bias)
            )
        replacement.meta = dict(node.meta)
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)
    for node in reversed(list(graph.nodes)):  # the transposes whose only reader was rewritten
        if node.op == "call_function" and not node.users and node.target in _TRANSPOSES:
            graph.erase_node(node)
    return fx.GraphModule(module, graph), deferred


def _call(rule: SplitRule, deferred: DeferredWork, made_bias: bool) -> Callable[..., Tensor]:
    def split_op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # Gradients of complex products are products with conjugates, which the rules do not make.
        if rule.applies(x, weight) and not (x.is_complex() or weight.is_complex()):
            result: Tensor = _SplitOp.apply(rule, deferred, x, weight, bias, made_bias)  # type: ignore[no-untyped-call]
            return result
        return rule.forward(x, weight, bias)

    split_op.__name__ = split_op.__qualname__ = f"split_{rule.name}"
    return split_op
