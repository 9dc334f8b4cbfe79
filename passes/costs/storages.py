"""The storage that each op's outputs and saved tensors live in: views are followed to their base."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from cost_models.arrays import FloatArray
from passes.costs.saved import SavedPlace
from passes.costs.size_model import FIRST_STORAGE, SizeModel
from passes.graph.blocks import MULTIPLYING
from passes.graph.graph import OpGraph
from passes.graph.signatures import SignatureTable
from runtime.segment.split_backward import find_site


@dataclass(frozen=True, eq=False)
class StorageTable:
    """Tuples follow ``graph.ops``."""

    outputs: tuple[tuple[str | None, ...], ...]
    saved: tuple[tuple[str, ...], ...]
    reads: tuple[tuple[tuple[int, str | None], ...], ...]
    """(index of the op that made the value, its storage) for each op result that the op reads."""
    single: tuple[bool, ...]
    """True if the op makes one tensor (its readers are not projections of a tuple)."""
    multiplies: tuple[bool, ...]
    """True if the op is a product: it keeps nothing of its result."""
    weight_half: tuple[bool, ...]
    """True if the op's backward computes gradients of parameters that the executor can put off."""
    index_of: Mapping[str, int]
    """Index of each op by name."""
    maker: Mapping[str, int]
    """Index of the op that makes the storage."""
    _rows: np.ndarray[tuple[int], np.dtype[np.intp]]
    _names: tuple[str, ...]
    _cache: dict[int, dict[str, int]] = field(default_factory=dict)

    def sizes(self, numbers: FloatArray, batch_size: int) -> Mapping[str, int]:
        """Return the bytes of each storage, given the size model's numbers."""
        if batch_size not in self._cache:
            values = numbers[self._rows].astype(np.int64).tolist()
            self._cache[batch_size] = dict(zip(self._names, values, strict=True))
        return self._cache[batch_size]


def name_storages(graph: OpGraph, table: SignatureTable, model: SizeModel) -> StorageTable:
    """Follow every output and saved tensor of every op to its storage; O(ops)."""
    index_of = {node.name: index for index, node in enumerate(graph.ops)}
    storage_of: dict[tuple[str, int], str | None] = {}
    row_of: dict[str, int] = {}
    maker: dict[str, int] = {}
    outputs: list[tuple[str | None, ...]] = []
    saved: list[tuple[str, ...]] = []
    for index, node in enumerate(graph.ops):
        operands = table.operands[index]
        structure = model.structures[table.of[index]]
        if node.target is operator.getitem:
            outputs.append((_projected(node, storage_of),))
            storage_of[node.name, 0] = outputs[-1][0]
            saved.append(())
            continue
        row = model.first_row[table.of[index]] + FIRST_STORAGE
        count = len(structure.output_alias)
        names: list[str | None] = []
        for j, alias in enumerate(structure.output_alias):
            if alias is not None:
                name = storage_of.get((operands[alias].node, operands[alias].element))
            elif structure.shared_output[j] != j:
                name = names[structure.shared_output[j]]
            else:
                name = node.name if count == 1 else f"{node.name}.{j}"
                row_of[name], maker[name] = row + j, index
            names.append(name)
            storage_of[node.name, table.elements[index][j]] = name
        for k in range(structure.own_storages):
            row_of[f"{node.name}~{k}"], maker[f"{node.name}~{k}"] = row + count + k, index
        of_place: dict[SavedPlace, list[str | None]] = {
            "operand": [storage_of.get((operand.node, operand.element)) for operand in operands],
            "output": names,
            "own": [f"{node.name}~{k}" for k in range(structure.own_storages)],
        }
        kept = [of_place[place][which] for place, which in structure.saved]
        saved.append(tuple(dict.fromkeys(name for name in kept if name is not None)))
        outputs.append(tuple(names))
    parameters = {graph.nodes[given.node]: given.name for given in graph.inputs if given.kind == "parameter"}
    reads = tuple(
        tuple((index_of[o.node], storage_of.get((o.node, o.element))) for o in operands if o.node in index_of)
        for operands in table.operands
    )
    return StorageTable(
        outputs=tuple(outputs),
        saved=tuple(saved),
        reads=reads,
        single=tuple(not isinstance(node.meta.get("val"), list | tuple) for node in graph.ops),
        multiplies=tuple(node.target in MULTIPLYING for node in graph.ops),
        weight_half=tuple(
            table.signatures[of].differentiated
            and any(o.role == "weight" for o in operands)
            and find_site(node, parameters) is not None
            for node, of, operands in zip(graph.ops, table.of, table.operands, strict=True)
        ),
        index_of=index_of,
        maker=maker,
        _rows=np.array(list(row_of.values()), dtype=np.intp),
        _names=tuple(row_of),
    )


def _projected(node: fx.Node, storage_of: Mapping[tuple[str, int], str | None]) -> str | None:
    source, element = node.args
    assert isinstance(source, fx.Node)
    assert isinstance(element, int)
    return storage_of.get((source.name, element))
