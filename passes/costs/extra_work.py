"""Work on an op's account that the op alone does not show: sums of gradients."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cost_models.arrays import FloatArray
from cost_models.compute import IndexArray
from passes.costs.storages import StorageTable
from passes.graph.graph import OpGraph
from passes.graph.signatures import SignatureTable


@dataclass(frozen=True, eq=False)
class Extra:
    """Work that one op alone does not show: summing gradients where several consumers, or micro-batches, add up.

    A value that k consumers differentiate has its k gradients added, k − 1 kernels, charged to its producer. A
    parameter's gradient is added to what earlier micro-batches left. Adding reads two tensors and writes one; a sum in
    another type than the parameter's (32 bits for 16) is preceded by a cast.
    """

    fan_out: FloatArray
    """k − 1 of each op, shape [ops]."""
    accumulated_bytes: FloatArray
    """Read and written to add the gradients of the parameters that each op reads, shape [ops]."""
    parameters: FloatArray
    """Kernels that this takes, shape [ops]."""
    weight_only: np.ndarray[tuple[int], np.dtype[np.bool_]]
    """Ops without an input half; their fan-out counts in the weight half."""

    def phase_of_sums(self) -> np.ndarray[tuple[int], np.dtype[np.str_]]:
        """Return the half of backward that each op's fan-out is charged to, shape [ops]."""
        return np.where(self.weight_only, "backward_weight", "backward_input")

    def rows(self, ops: IndexArray) -> Extra:
        """Take the rows of these ops, in this order."""
        return Extra(
            self.fan_out[ops], self.accumulated_bytes[ops], self.parameters[ops], self.weight_only[ops]
        )

    def of(self, op_index: int) -> tuple[float, ...]:
        """Return all numbers of one op."""
        columns = (self.fan_out, self.accumulated_bytes, self.parameters, self.weight_only)
        return tuple(float(column[op_index]) for column in columns)

    def add_to(self, columns: dict[str, FloatArray]) -> None:
        """Count this work in ``columns`` (those of ``OpTable``, by name)."""
        summed = 3 * self.fan_out * columns["output_bytes"]
        for half, mine in (("input", ~self.weight_only), ("weight", self.weight_only)):
            columns[f"backward_{half}_bytes"] = columns[f"backward_{half}_bytes"] + summed * mine
            columns[f"backward_{half}_launches"] = columns[f"backward_{half}_launches"] + self.fan_out * mine
        columns["backward_weight_bytes"] = columns["backward_weight_bytes"] + self.accumulated_bytes
        columns["backward_weight_launches"] = columns["backward_weight_launches"] + self.parameters


def extra_work(graph: OpGraph, table: SignatureTable, storages: StorageTable) -> Extra:
    """Count the sums of gradients on the account of every op of ``graph``; O(ops)."""
    name_of = {i.node: i.name for i in graph.inputs if i.kind == "parameter"}
    fan_out = np.zeros(len(graph.ops))
    accumulated_bytes = np.zeros(len(graph.ops))
    parameters = np.zeros(len(graph.ops))
    weight_only = np.zeros(len(graph.ops), dtype=bool)
    for index, node in enumerate(graph.ops):
        if node.name not in graph.needs_grad:
            continue
        readers = sum(user.name in graph.needs_grad for user in node.users)
        fan_out[index] = max(0, readers - 1) if storages.single[index] else 0
        trained = [
            s for s in dict.fromkeys(node.all_input_nodes) if s.name in name_of and s.name in graph.needs_grad
        ]
        for name in (name_of[source.name] for source in trained):
            types, elements = graph.types_of(name, graph.precision), graph.parameters[name].elements
            casts = types.leaf != types.gradient
            cast_itemsize = types.leaf.itemsize + types.gradient.itemsize if casts else 0
            accumulated_bytes[index] += elements * (3 * types.gradient.itemsize + cast_itemsize)
            parameters[index] += 1 + casts
        weight_only[index] = all(operand.role != "input" for operand in table.operands[index])
    return Extra(fan_out, accumulated_bytes, parameters, weight_only)
