"""Families: the neurons that can be dealt out to devices, for whoever chooses how many each device gets.

    transformer.h.0.attn   heads     4    addmm            addmm in blocks [8, 24] * 3 (query, key, value): 1 and 3 heads
    transformer.h.0.mlp    neurons   128  addmm_2          addmm_2 in blocks [100, 28]
    encoder.cells.0        units     6    linear, linear_1, …     each in blocks [4, 2] * 4 (its gates)

The units of a family are cut together in all of its ops (``passes.split.strands``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
from torch import fx

from cost_models.errors import UsageError
from passes.graph.graph import OpGraph, tensor_specs
from passes.graph.nodes import argument
from passes.shard.words import operands
from passes.split.rules import CONVOLUTIONS
from passes.split.split import Split
from passes.split.strands import Seed, Strand, Strands
from runtime.ops.flex import ATTENTION

aten = torch.ops.aten


@dataclass(frozen=True)
class Family:
    """Units that may go to different devices.

    ``kind``: "neurons", "heads", "channels", "experts", "units" (of a recurrent cell) or "locations" (of a locally
    connected layer). ``ops``: the seeds.
    ``flops``: forward, of one example batch, of everything that is split with them: the seeds, what follows in blocks, and
    the ops that sum over the units (but for those that are seeds of another family).
    ``cuts``: per seed its dimension, and the elements of one unit in each segment of it. ``members``: all that ``flops``
    counts. ``ends``: ops that sum over the units, those that are seeds of another family too.
    """

    name: str
    units: int
    kind: str
    ops: tuple[str, ...]
    flops: float
    cuts: tuple[tuple[int, tuple[int, ...]], ...]
    members: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()

    def splits(self, sizes: Sequence[int]) -> tuple[Split, ...]:
        """Return what to give to ``split_neurons`` for blocks of ``sizes`` units."""
        if min(sizes, default=0) < 1 or sum(sizes) != self.units:
            raise UsageError(
                f"{self.name} cannot be split into {', '.join(map(str, sizes)) or 'nothing'}",
                [f"it has {self.units} {self.kind}"],
                ["sizes of at least 1 that add up to it"],
            )
        return tuple(
            Split(op, dim, tuple(per_unit * size for per_unit in segments for size in sizes))
            for op, (dim, segments) in zip(self.ops, self.cuts, strict=True)
        )


def families(graph: OpGraph) -> tuple[Family, ...]:
    """List all families of a graph, in the order of their first ops."""
    strands = Strands(graph)
    found: dict[Strand, list[Seed]] = {}
    for seed in strands.seeds:
        leaves = {strand for _, strand in seed.strand.leaves()}
        if len(leaves) == 1 and seed.strand.root.is_tiled():
            found.setdefault(leaves.pop(), []).append(seed)
    summed = {end for strand in found for end in strand.ends}
    kept = {
        strand: seeds
        for strand, seeds in found.items()
        if math.gcd(*strand.lengths) > 1 and (strand.ends or not all(seed.node in summed for seed in seeds))
    }
    kept |= {s: seeds for s, seeds in found.items() if s not in kept and _is_last(graph, strands, s, seeds)}
    names = _names(kept)
    makers = {seed.node for seeds in kept.values() for seed in seeds}
    return tuple(_family(graph, names[strand], strand, seeds, makers) for strand, seeds in kept.items())


def _is_last(graph: OpGraph, strands: Strands, strand: Strand, seeds: Sequence[Seed]) -> bool:
    """Tell whether nothing with weights comes after: the projection to the vocabulary or the classes."""
    if math.gcd(*strand.lengths) == 1:
        return False
    makers = {seed.node for seed in strands.seeds}
    seen = {seed.node for seed in seeds}
    waiting = list(seen)
    while waiting:
        for user in waiting.pop().users:
            if user in makers:
                return False
            if user not in seen and user.op == "call_function":
                seen.add(user)
                waiting.append(user)
    return True


def _family(
    graph: OpGraph, name: str, strand: Strand, seeds: Sequence[Seed], makers: Collection[fx.Node]
) -> Family:
    units = math.gcd(*strand.lengths)
    cuts = []
    for seed in seeds:
        size = int(seed.node.meta["val"].shape[seed.dim])
        shares = [share for share, _ in seed.strand.leaves()]
        cuts.append((seed.dim, tuple(int((end - begin) * size) // units for begin, end in shares)))
    ends = (end for end in strand.ends if end not in makers)
    ops = dict.fromkeys([*(seed.node for seed in seeds), *strand.ops, *ends])
    return Family(
        name,
        units,
        _kind(strand, seeds, cuts),
        tuple(seed.node.name for seed in seeds),
        sum(flops(graph, node) for node in ops),
        tuple(cuts),
        tuple(node.name for node in ops),
        tuple(dict.fromkeys(end.name for end in strand.ends)),
    )


def _kind(strand: Strand, seeds: Sequence[Seed], cuts: Sequence[tuple[int, tuple[int, ...]]]) -> str:
    targets = {node.target for node in strand.ops}
    if targets & {*ATTENTION, aten.softmax.int, aten._softmax.default}:
        return "heads"
    kinds = {seed.kind for seed in seeds} - {"neurons"}
    if kinds:
        return min(kinds)
    gates = {aten.sigmoid.default, aten.tanh.default} <= targets
    return "units" if gates and all(len(segments) > 1 for _, segments in cuts) else "neurons"


def _names(found: Mapping[Strand, Sequence[Seed]]) -> dict[Strand, str]:
    """Name each family by the module that has all of its ops and no other family's; else by the first seed's own."""
    homes = {strand: [_module(seed.node) for seed in seeds] for strand, seeds in found.items()}
    names: dict[Strand, str] = {}
    for strand, seeds in found.items():
        name = _common([*homes[strand], *map(_module, strand.ops), *map(_module, strand.ends)])
        others = (home for other, given in homes.items() if other is not strand for home in given)
        alone = name and not any(f"{home}.".startswith(f"{name}.") for home in others)
        names[strand] = name if alone else _first(seeds)
    counts = Counter(names.values())
    return {
        strand: name if counts[name] == 1 else f"{name}:{found[strand][0].node.name}"
        for strand, name in names.items()
    }


def _first(seeds: Sequence[Seed]) -> str:
    """Return the first seed's module, or the one around it if that has other seeds too (a cell of several layers)."""
    name = _module(seeds[0].node) or seeds[0].node.name
    around = name.rpartition(".")[0]
    others = {_module(seed.node) for seed in seeds} - {name}
    return around if around and any(other.startswith(f"{around}.") for other in others) else name


def _module(node: fx.Node) -> str:
    return str(node.meta.get("module_path", ""))


def _common(paths: Sequence[str]) -> str:
    split = [path.split(".") for path in paths if path]
    together = takewhile(lambda parts: len(set(parts)) == 1, zip(*split, strict=False))
    return ".".join(parts[0] for parts in together)


def flops(graph: OpGraph, node: fx.Node) -> float:
    """Count forward FLOPs on one example batch: 2 · outputs · terms of each, for a product; 1 per output for other ops."""
    numbers = dict.fromkeys(graph.batch.symbols, graph.example_batch_size)
    shapes = [spec.concrete(numbers) for spec in tensor_specs(node)]
    made = float(sum(map(math.prod, shapes)))
    terms = list(_terms(node, numbers))
    return 2 * made * terms[0] if terms else made


def _terms(node: fx.Node, numbers: Mapping[Any, int]) -> Iterator[float]:
    """Yield how many products are summed for each output."""
    sources = [spec.concrete(numbers) for source in operands(node) for spec in tensor_specs(source)]
    if node.target in ATTENTION:
        yield sources[1][-2] * (1 + sources[0][-1] / sources[2][-1])
    elif node.target in (aten.linear.default, aten.mm.default, aten.bmm.default, aten.matmul.default):
        yield sources[0][-1]
    elif node.target in (aten.addmm.default, aten.baddbmm.default):
        yield sources[1][-1]
    elif node.target in CONVOLUTIONS:
        yield math.prod(sources[1][1:])
    elif node.target is aten.einsum.default:
        left, _, right = str(argument(node, "equation")).replace(" ", "").partition("->")
        lengths = dict(
            pair
            for text, sizes in zip(left.split(","), sources, strict=True)
            for pair in zip(text, sizes, strict=False)
        )
        yield math.prod(size for letter, size in lengths.items() if letter not in right)
