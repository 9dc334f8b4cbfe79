"""A recorded run of a block, written into the graph once more, for another block of the same model.

Every node is made as the tracer would make it, so names and their numbers come as in a run: same op, same word for the
name, its inputs those of this block, the origin with this block's path. Values are fake tensors of the same sizes in
memory of their own, shared where the recorded run's share it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import no_python_dispatcher
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch.fx.experimental import proxy_tensor
from torch.utils._python_dispatch import _disable_current_modes

from passes.graph.nodes import storage_key, symbolic
from passes.trace.repeat.record import Argument, NotRepeatableError, Recorded, RecordedNode, Returned, node_of
from passes.trace.repeat.sight import Sight


def replay(tracer: Any, recorded: Recorded, path: str, sight: Sight, mode: FakeTensorMode) -> Any:
    """Write the nodes of a run of the block at ``path``, which sees ``sight``; return what the run would return.

    Raises NotRepeatableError, with nothing written, if its inputs do not fit.
    """
    inputs = _inputs(tracer, recorded, sight)
    with untraced():
        try:
            results = {each.node: _result(each, mode) for each in _returned(recorded.result)}
            values = _BlockValues(mode, inputs, {node: tensor.detach() for node, tensor in results.items()})
            made = [values.of(each.node.meta["val"]) for each in recorded.nodes]
        except RuntimeError as error:  # before anything is written
            raise NotRepeatableError(str(error)) from error
        here = dict(inputs)
        for each, value in zip(recorded.nodes, made, strict=True):
            here[each.node] = _write(tracer, recorded, each, path, here)
            here[each.node].meta["val"] = value
        with proxy_tensor._enable_thunkify(tracer):
            for node, tensor in results.items():
                proxy_tensor.track_tensor(tensor, fx.Proxy(here[node], tracer), constant=None, tracer=tracer)
    for place, node in recorded.renamed.items():
        tensor = sight.tensors[place] if isinstance(place, int) else sight.state[place]
        slot = proxy_tensor._ProxyTensor(fx.Proxy(here[node], tracer), None)
        proxy_tensor.set_proxy_slot(tensor, tracer, slot)
    for name, count in recorded.calls.items():
        tracer.num_calls[_moved(name, recorded.path, path)] = count
    return _give(recorded.result, results, sight)


def _inputs(tracer: Any, recorded: Recorded, sight: Sight) -> dict[fx.Node, fx.Node]:
    """Pair the nodes that the recorded run reads with those that this one is to read."""
    pairs = list(zip(recorded.arguments, (node_of(tracer, t) for t in sight.tensors), strict=True))
    pairs += [(node, node_of(tracer, sight.state[place])) for place, node in recorded.state.items()]
    pairs += [(node, node) for node in recorded.sizes]
    inputs: dict[fx.Node, fx.Node] = {}
    for old, new in pairs:
        if inputs.setdefault(old, new) is not new:
            raise NotRepeatableError("tensors are one in one block and two in the other")
    return inputs


@contextmanager
def untraced() -> Iterator[None]:
    """Make tensors that no mode of torch's sees: neither a tracer nor a mode of functions."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad():
        yield


class _BlockValues:
    """Values of this block's nodes, made from those of the recorded run."""

    def __init__(
        self, mode: FakeTensorMode, inputs: dict[fx.Node, fx.Node], results: dict[fx.Node, Tensor]
    ) -> None:
        self._mode = mode
        self._memory: dict[int | None, Tensor] = {}
        """A tensor of this block in the memory that stands for the recorded run's, by that one's key."""
        values = {old: new.meta.get("val") for old, new in inputs.items()} | results
        for old, value in values.items():
            if isinstance(value, Tensor):
                self._memory[storage_key(old.meta["val"])] = value

    def of(self, value: Any) -> Any:
        """Return the value that stands for a recorded one."""
        if isinstance(value, list | tuple):
            return type(value)(map(self.of, value))
        if not isinstance(value, FakeTensor):
            return value
        key = storage_key(value)
        with no_python_dispatcher(), in_kernel_invocation_manager(self._mode):
            if key in self._memory:
                known = self._memory[key]
                if known.dtype != value.dtype:
                    known = known.view(value.dtype)
                made = torch.as_strided(known, value.size(), value.stride(), value.storage_offset())
            else:  # the only way to new memory of these sizes that works none of them out again
                made = torch._lazy_clone(value)
        fake = FakeTensor(self._mode, made, value.device)
        self._memory.setdefault(key, fake)
        return fake


def _write(
    tracer: Any, recorded: Recorded, made: RecordedNode, path: str, here: dict[fx.Node, fx.Node]
) -> fx.Node:
    """Make one node."""
    old = made.node
    args, kwargs = fx.map_arg((old.args, old.kwargs), here.__getitem__)
    node: fx.Node = tracer.graph.create_node("call_function", old.target, args, kwargs, made.word)
    node.meta.update(old.meta)
    stack = list(old.meta["nn_module_stack"].items())
    node.meta["nn_module_stack"] = OrderedDict(
        entry
        if number < recorded.depth
        else (_moved(entry[0], recorded.path, path), (_moved(entry[1][0], recorded.path, path), entry[1][1]))
        for number, entry in enumerate(stack)
    )
    name, kind = tracer.node_name_to_scope[old.name]
    tracer.node_name_to_scope[node.name] = (_moved(name, recorded.path, path), kind)
    return node


def _moved(name: str, old: str, new: str) -> str:
    """Rename a module of the recorded block to that of this one."""
    return new + name.removeprefix(old)


def _returned(result: Any) -> Iterator[Returned]:
    if isinstance(result, Returned):
        yield result
    elif isinstance(result, dict):
        for item in result.values():
            yield from _returned(item)
    elif isinstance(result, tuple | list):
        for item in result:
            yield from _returned(item)


def _result(returned: Returned, mode: FakeTensorMode) -> Tensor:
    """Make a tensor as the run returned it: new memory, computed from what needs a gradient if that one is."""
    old = returned.tensor
    with no_python_dispatcher(), in_kernel_invocation_manager(mode):
        made = torch._lazy_clone(returned.node.meta["val"])
    tensor: Tensor = FakeTensor(mode, made, old.device)
    if not old.requires_grad:
        return tensor
    with torch.enable_grad(), mode:
        made = tensor.requires_grad_().clone()
    if list(map(symbolic, made.stride())) != list(map(symbolic, old.stride())):
        raise NotRepeatableError("a copy of what it returns is in another order")
    return made


def _give(result: Any, results: dict[fx.Node, Tensor], sight: Sight) -> Any:
    if isinstance(result, Returned):
        return results[result.node]
    if isinstance(result, Argument):
        return sight.tensors[result.number]
    if isinstance(result, dict):
        return {key: _give(item, results, sight) for key, item in result.items()}
    if isinstance(result, tuple | list):
        return type(result)(_give(item, results, sight) for item in result)
    return result
