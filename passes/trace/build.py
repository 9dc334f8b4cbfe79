"""The parts of an OpGraph, made from torch's ExportedProgram.

Before                                                    After
    p_model_h_0_ln_weight: PARAMETER "model.h.0.ln.weight"    GraphInput(node, "parameter", "h.0.ln.weight")
    p_model_lm_head_weight, tied to p_model_wte_weight        one placeholder, "wte.weight"
    nn_module_stack {..., "model.h.0": GPT2Block}             meta["module_path"] = "h.0"
    stack_trace 'File "/x/gpt2.py", line 231, in ...'         meta["source"] = "gpt2.py:231"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from cost_models.errors import InternalError, ModelError
from passes.graph.graph import GraphInput, GraphOutput
from passes.graph.nodes import SYNCHRONIZED, op_name, where
from passes.graph.sizes import are_canonical, canonical_sizes
from passes.trace.export import OutputRecord
from passes.trace.names import StateNames
from passes.trace.normal.bags import simplify_bags
from passes.trace.normal.flex_fold import fold_flex
from passes.trace.normal.functional import functionalize
from passes.trace.normal.grouped_queries import share_heads
from passes.trace.normal.masks import simplify_masks
from passes.trace.normal.simplify import simplify
from passes.trace.opaque.cross import restore
from passes.trace.opaque.refused import OPAQUE_ADVICE, PartError, blamed, without_slices
from passes.trace.remake_views import remake_views
from runtime.ops.opaque import Opaque
from runtime.state.state_view import StateView
from runtime.user_code import line_in

_PREFIX = "model."
_EXPORT_META = (
    "nn_module_stack",
    "stack_trace",
    "torch_fn",
    "tensor_meta",
    "from_node",
    "source_fn_stack",
    "custom",
)
"""Entries that export leaves in a node's meta and nobody reads afterwards."""


@dataclass(frozen=True)
class Converted:
    """The traced graph, functional, with names."""

    module: fx.GraphModule
    inputs: tuple[GraphInput, ...]
    outputs: tuple[GraphOutput, ...]
    constants: Mapping[str, Tensor]
    views: Mapping[str, StateView]
    """The tensors that are read from an owner, those that no op reads among them."""


def leaf_nodes(program: ExportedProgram, names: tuple[str, ...]) -> dict[str, fx.Node]:
    """Return the placeholder of every batch leaf, by leaf name."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    users = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    return {name: nodes[spec.arg.name] for name, spec in zip(names, users, strict=True)}


def convert(
    program: ExportedProgram,
    record: OutputRecord,
    state: StateNames,
    fake_mode: FakeTensorMode,
    leaf_names: tuple[str, ...],
    model: nn.Module,
    opaque: Mapping[str, Opaque],
    attributes: Mapping[str, Tensor],
) -> Converted:
    """Name inputs, merge ties, run ``simplify``, ``remake_views``, ``functionalize``, ``simplify_masks``,
    ``fold_flex``, ``share_heads``, ``simplify_bags`` and ``canonical_sizes``, note where every node comes from.

    ``attributes``: what the model itself has where the trace saw a stand-in of a plain attribute, by name.
    """
    module = program.graph_module
    held: dict[str, Tensor] = {}
    stands_for = _placeholders(program, state, leaf_names, held)
    held.update({name: tensor for name, tensor in attributes.items() if name in held})
    _check_transforms(module.graph)
    stands_for = _merge_ties(module.graph, stands_for)
    _check_output_kinds(program)
    module = simplify(module)
    restore(module.graph, opaque)
    stands_for, read = remake_views(module.graph, stands_for, state.shared, held)
    left = {entry.name for entry in stands_for.values() if entry.kind == "constant"}
    constants = {name: _constant(name, value) for name, value in held.items() if name in left}
    _check_constants(constants)
    buffers = {i.node: i.name for i in stands_for.values() if i.kind == "buffer"}
    parameters = [i.node for i in stands_for.values() if i.kind == "parameter"]
    names = {i.node: i.name for i in stands_for.values()}
    module, written = functionalize(module, buffers, names, parameters)
    simplify_masks(module.graph)
    fold_flex(module.graph)
    share_heads(module.graph)
    simplify_bags(module.graph)
    _annotate(module.graph, fake_mode, model)
    outputs = _outputs(module, record, written)
    batch = [node for node, entry in stands_for.items() if entry.kind == "batch"]
    if not are_canonical(module.graph, batch):  # only where pass functional had to read a shape
        module = canonical_sizes(module, batch)
    inputs = used_inputs(module.graph, stands_for)
    kept = {i.name for i in inputs if i.kind == "constant"}
    module.graph.lint()
    module.recompile()
    constants = {name: value for name, value in constants.items() if name in kept}
    return Converted(module, inputs, outputs, constants, {**read, **state.views})


def _placeholders(
    program: ExportedProgram, state: StateNames, leaf_names: tuple[str, ...], constants: dict[str, Tensor]
) -> dict[str, GraphInput]:
    """Return the input that each placeholder stands for, by node name; real constants are collected on the way."""
    leaves = iter(leaf_names)
    result: dict[str, GraphInput] = {}
    for spec in program.graph_signature.input_specs:
        node = spec.arg.name
        target = (spec.target or "").removeprefix(_PREFIX)
        ours = (spec.target or "").startswith(_PREFIX)
        if spec.kind is InputKind.USER_INPUT:
            result[node] = GraphInput(node, "batch", next(leaves))
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER) and ours:
            name = state.canonical(target)
            result[node] = GraphInput(node, "parameter" if name in state.parameters else "buffer", name)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
            constants[target] = _held(program, spec.target or "")
            result[node] = GraphInput(node, "constant", target)
        else:
            raise _unheld(program, node, target or node)
    return result


def _unheld(program: ExportedProgram, placeholder: str, target: str) -> ModelError:
    """Make the error for an object that is neither a tensor nor a number: a generator, an object of TorchScript."""
    value = program.constants.get(_PREFIX + target)
    readers = list(next(node for node in program.graph.nodes if node.name == placeholder).users)
    advice = "keep objects of TorchScript out of forward"
    if isinstance(value, torch.Generator):
        advice = "draw from torch's default generator (generator=None), which torch.manual_seed seeds"
    return ModelError(
        "the model uses an object that a plan cannot hold",
        [f"a {type(value).__name__} is read by {where(node)}" for node in readers] or [target],
        [advice],
    )


def _held(program: ExportedProgram, target: str) -> Tensor:
    value: Any = program.constants.get(target)
    return program.state_dict[target] if value is None else value  # type: ignore[no-any-return]


def _constant(name: str, value: Tensor) -> Tensor:
    """Return a lifted tensor's values, which a plan never changes."""
    if isinstance(value, torch.nn.Parameter) and value.requires_grad:
        raise ModelError(
            f"the loss function trains a parameter of its own, {name}",
            ["only the model's parameters are partitioned and optimized"],
            ["make the loss function part of the model, and return the loss from forward"],
        )
    if value.requires_grad and value.grad_fn is not None:
        raise ModelError(
            "the model keeps a tensor that was computed from parameters before forward",
            [f"{name} is the result of {type(value.grad_fn).__name__}, and its gradient would be lost"],
            ["compute it in forward", "or keep its values only: tensor.detach().clone()"],
        )
    return value.detach()


def _check_constants(constants: Mapping[str, Tensor]) -> None:
    lost = [name for name, value in constants.items() if value.is_meta or isinstance(value, FakeTensor)]
    if lost:
        raise ModelError(
            "the model holds tensors that have no values",
            [f"{name} is on the meta device and neither a parameter nor a buffer" for name in lost],
            ["self.register_buffer(name, tensor, persistent=False) instead of a plain attribute"],
        )


def _check_transforms(graph: fx.Graph) -> None:
    """Refuse ``torch.vmap``: it leaves calls between batched tensors, which no graph of ours can hold."""
    found = [node for node in graph.nodes if getattr(node.target, "__name__", "") == "_add_batch_dim"]
    if found:
        raise PartError(
            "the model uses torch.vmap, which the traced graph cannot hold",
            list(dict.fromkeys(where(node).split(" in ", 1)[-1] for node in found)),
            ["let the operations broadcast over a batch dimension instead", OPAQUE_ADVICE],
            list(map(blamed, found)),
        )


def _merge_ties(graph: fx.Graph, stands_for: Mapping[str, GraphInput]) -> dict[str, GraphInput]:
    """Leave one placeholder per tensor: a tied parameter arrives under each of its names."""
    first: dict[tuple[str, str], fx.Node] = {}
    result: dict[str, GraphInput] = {}
    for node in graph.find_nodes(op="placeholder"):
        what = stands_for[node.name]
        keeper = first.setdefault((what.kind, what.name), node)
        if keeper is node:
            result[node.name] = what
        else:
            node.replace_all_uses_with(keeper)
            graph.erase_node(node)
    return result


def _check_output_kinds(program: ExportedProgram) -> None:
    """Check that no output is a write: writes are operations in the graph, or it would not be what we expect."""
    kinds = {spec.kind for spec in program.graph_signature.output_specs} - {OutputKind.USER_OUTPUT}
    if kinds:
        raise InternalError("trace: export returned outputs of an unknown kind", sorted(map(str, kinds)))


def _outputs(
    module: fx.GraphModule, record: OutputRecord, written: Mapping[str, str]
) -> tuple[GraphOutput, ...]:
    """Describe the output tuple, extended by the new contents of the buffers that are written."""
    graph = module.graph
    node = graph.output_node()
    values = list(node.args[0])  # type: ignore[arg-type]
    constant = [name for name, v in zip(record.names, values, strict=True) if not isinstance(v, fx.Node)]
    if constant:
        raise ModelError(
            "some outputs of the model are constants", constant, ["return tensors that are computed"]
        )
    described = [
        GraphOutput(value.name, kind, name)
        for name, kind, value in zip(record.names, record.kinds, values, strict=True)
    ]
    nodes = {n.name: n for n in graph.nodes}
    described += [GraphOutput(name, "buffer", buffer) for buffer, name in written.items()]
    node.args = (tuple(nodes[o.node] for o in described),)
    return tuple(described)


def used_inputs(graph: fx.Graph, stands_for: Mapping[str, GraphInput]) -> tuple[GraphInput, ...]:
    """Drop placeholders that nothing reads; return the inputs of the others, in the graph's order.

    The model's state keeps all its names in ``OpGraph.parameters``.
    """
    inputs = []
    for node in graph.find_nodes(op="placeholder"):
        if node.users:
            inputs.append(stands_for[node.name])
        else:
            graph.erase_node(node)
    return tuple(inputs)


# --------------------------------------------------------------------------------------------------
# The origin of every node


def _annotate(graph: fx.Graph, fake_mode: FakeTensorMode, model: nn.Module) -> None:
    """Set ``module_path`` and ``source``, make every value a fake CPU tensor, and drop what only export
    needed.
    """
    for node in graph.nodes:
        stack = node.meta.get("nn_module_stack")
        if stack:
            node.meta["module_path"] = _module_path(next(reversed(stack.values()))[0], model)
            node.meta["part"] = blamed(node)
            if op_name(node) == "batch_norm":
                owner = model.get_submodule(node.meta["module_path"])
                node.meta[SYNCHRONIZED] = isinstance(owner, nn.SyncBatchNorm)
        node.meta.setdefault("module_path", "")
        node.meta["source"] = node.meta.get("source") or line_in(node.meta.get("stack_trace") or "")
        for key in _EXPORT_META:
            node.meta.pop(key, None)
        if "val" in node.meta:
            node.meta["val"] = _on_cpu(node.meta["val"], fake_mode)


def _module_path(path: str, model: nn.Module) -> str:
    """Return the path without the wrapper that joins model and loss; the loss function has none."""
    if not path.startswith(_PREFIX):
        return ""
    return without_slices(path.removeprefix(_PREFIX), model)


def _on_cpu(value: Any, fake_mode: FakeTensorMode) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(item, fake_mode) for item in value)
    if isinstance(value, Tensor) and value.device.type != "cpu":
        with fake_mode:
            return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="cpu")
    return value
