"""Small models, and placements on meshes that are forced by hand: each op takes the cheapest choice for what is pinned.

A placement here is greedy, op after op: of an op's choices the one that moves the fewest bytes from how its operands
lie, with whole tensors as expensive as they are large. Pins say how parameters are stored and how values must come out.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from cost_models.layout import Mesh, Partial, Placement, Replicate, Shard
from passes.graph.graph import OpGraph
from passes.graph.nodes import tensors_of
from passes.shard.rules import choices
from passes.shard.rules.shapes import shape
from passes.shard.words import Choice, FeaturePlacement, operands

R, P = Replicate(), Partial()


class Mlp(nn.Module):
    """Shapes: x, y [b, 8]."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = ((self.down(F.gelu(self.up(x))) + x - y) ** 2).mean()
        return loss


class Block(nn.Module):
    """A transformer block: x [b, s, 16], 4 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        q, k, v = (w(h).unflatten(-1, (4, 4)).transpose(1, 2) for w in (self.q, self.k, self.v))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return y


class FusedBlock(nn.Module):
    """A transformer block whose heads come of one product, and lie side by side: x [b, s, 16], 4 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (part.view(b, s, 4, 4).transpose(1, 2) for part in self.qkv(x).split(d, dim=2))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(a.transpose(1, 2).contiguous().view(b, s, d))
        y: Tensor = x + self.down(F.gelu(self.up(x)))
        return y


class FusedGpt(nn.Module):
    """x, y [b, 4, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.block = FusedBlock()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = ((self.block(x) - y) ** 2).mean()
        return loss


def fused_batch(samples: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(6)
    return {k: torch.randn(samples, 4, 16, generator=g, dtype=torch.float64) for k in ("x", "y")}


class Gpt(nn.Module):
    """ids, labels [b, 8]; 24 tokens; the output weight is the embedding's."""

    def __init__(self, tied: bool = True, blocks: int = 2) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(24, 16), nn.Embedding(8, 16)
        self.h = nn.ModuleList([Block() for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 24, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


class Conv(nn.Module):
    """x [b, 3, 8, 8], y [b] of 10 classes. Running statistics; convolutions and normalization in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.gn = nn.Conv2d(8, 8, 3, padding=1, groups=4), nn.GroupNorm(4, 8)
        self.out = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(self.bn(self.first(x))), 2)
        return F.cross_entropy(self.out(self.gn(self.second(h)).flatten(1)), y)


class Sizes(nn.Module):
    """Sizes as numbers: x, y [b, 8], a mean by hand, views and constants of the batch's size."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.o = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        b = x.shape[0]
        q, k, v = (part.reshape(b * 2, 4).view(b, 2, 4) for part in self.w(x).chunk(3, -1))
        h = (torch.softmax(q @ k.transpose(1, 2) / b, -1) @ v).flatten(1)
        h = h + torch.zeros(b, 8, dtype=h.dtype) + torch.arange(b, dtype=h.dtype)[:, None] / 8
        loss: Tensor = ((self.o(h) * torch.ones(b, 1, dtype=h.dtype).expand(b, 8) - y) ** 2).sum() / b
        return loss


def conv_batch(samples: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(samples, 3, 8, 8, generator=g, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, 10, (samples,), generator=g)}


def mlp_batch(samples: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    return {k: torch.randn(samples, 8, generator=g, dtype=torch.float64) for k in ("x", "y")}


def gpt_batch(samples: int) -> dict[str, Tensor]:
    """Labels as many as positions, some ignored, unevenly."""
    g = torch.Generator().manual_seed(4)
    batch = {k: torch.randint(0, 24, (samples, 8), generator=g) for k in ("ids", "labels")}
    batch["labels"][0, :5] = -100
    batch["labels"][-1, 2] = -100
    return batch


@dataclass(frozen=True)
class Forced:
    """What is pinned on one axis, by pattern: storage of parameters, layouts of ops' values (by op or module).

    ``state``: of gradients and optimizer state (ZeRO-1, 2).
    """

    stored: Mapping[str, Placement] = field(default_factory=dict)
    values: Mapping[str, Placement] = field(default_factory=dict)
    batch: Placement = R
    state: Placement | None = None


BATCH = Forced(batch=Shard(0), values={"*": Shard(0)})
ZERO1 = Forced(batch=Shard(0), values={"*": Shard(0)}, state=Shard(0))
ZERO3 = Forced(stored={"*": Shard(0)}, batch=Shard(0), values={"*": Shard(0)})
COLUMN_ROW = Forced(
    stored={
        **{f"*{n}.{p}": Shard(0) for n in ("up", "q", "k", "v") for p in ("weight", "bias")},
        **{f"*{n}.weight": Shard(1) for n in ("down", "o")},
    },
    values={"*embedding*": R, "*add*": R, "*norm*": R},
)
HEADS = Forced(
    stored={"*qkv.*": Shard(0), "*.o.weight": Shard(1), "*up.*": Shard(0), "*down.weight": Shard(1)},
    values={"*qkv": Shard(2), "*attention*": Shard(1), "*add*": R},
)
"""Of a product of queries, keys and values together, which is whole between its columns and the heads."""
SEQUENCE = Forced(
    stored=COLUMN_ROW.stored,
    values={
        **{f"*.{n}": Shard(2) for n in ("q", "k", "v", "up")},
        **{f"*.{n}": P for n in ("o", "down")},
        **{glob: Shard(1) for glob in ("*embedding*", "*add*", "*norm*")},
    },
)
VOCABULARY = Forced(
    stored={"wte.weight": Shard(0), "head.weight": Shard(0)},
    values={"wte": P, "head": Shard(2), "*cross_entropy*": R},
)


CHANNELS = Forced(
    stored={"first.*": Shard(0), "second.*": Shard(0), "bn.*": Shard(0), "out.weight": Shard(1)},
    values={"*conv*": Shard(1), "bn": Shard(1), "gn": Shard(1)},
)
SPLIT = Forced(values={"*": Shard(0)})
"""By sample, though every rank is given the whole batch."""


def place(graph: OpGraph, mesh: Mesh, forced: tuple[Forced, ...], microbatches: int) -> FeaturePlacement:
    """One ``Forced`` per axis of ``mesh``."""
    per_axis = [_Greedy(graph, size, f) for size, f in zip(mesh.shape, forced, strict=True)]
    done: list[tuple[dict[str, Choice], dict[str, Placement]]] = []
    taken: dict[str, list[tuple[Placement, int]]] = {}
    for greedy in per_axis:
        done.append(greedy.run(taken))
    names = done[0][0]
    stored = [greedy.stored_all(taken_sizes(mesh, i)) for i, greedy in enumerate(per_axis)]
    return FeaturePlacement(
        mesh,
        {name: tuple(choices_[name] for choices_, _ in done) for name in names},
        {name: tuple(s[name] for s in stored) for name in (*graph.parameters, *graph.buffers)},
        {leaf: tuple(f.batch for f in forced) for leaf in graph.batch.batch_dims},
        microbatches,
        {
            name: tuple(
                f.state
                if f.state is not None and stored[i][name] == R and divides(spec.shape, mesh.shape[i])
                else stored[i][name]
                for i, f in enumerate(forced)
            )
            for name, spec in graph.parameters.items()
        },
    )


def divides(shape_: tuple[int, ...], size: int) -> bool:
    return bool(shape_) and shape_[0] % size == 0


def taken_sizes(mesh: Mesh, axis: int) -> int:
    return math.prod(mesh.shape[:axis])


class _Greedy:
    def __init__(self, graph: OpGraph, size: int, forced: Forced) -> None:
        self.graph, self.size, self.forced = graph, size, forced
        self.layout: dict[str, tuple[Placement, ...]] = {}

    def stored_all(self, others: int) -> dict[str, Placement]:
        found: dict[str, Placement] = {}
        for name, spec in (*self.graph.parameters.items(), *self.graph.buffers.items()):
            wanted = next((p for glob, p in self.forced.stored.items() if fnmatch.fnmatch(name, glob)), R)
            if isinstance(wanted, Shard) and (
                wanted.dim >= len(spec.shape) or spec.shape[wanted.dim] % (self.size * others)
            ):
                wanted = R
            found[name] = wanted
        return found

    def run(
        self, taken: dict[str, list[tuple[Placement, int]]]
    ) -> tuple[dict[str, Choice], dict[str, Placement]]:
        """``taken``: per op output, what earlier axes have cut."""
        stored = self.stored_all(1)
        for given in self.graph.inputs:
            if given.kind in ("parameter", "buffer"):
                self.layout[given.node] = (stored[given.name],)
            else:
                self.layout[given.node] = (self.forced.batch if given.kind == "batch" else R,)
        chosen: dict[str, Choice] = {}
        for node in self.graph.ops:
            found = choices(node)
            if found:
                best = min(
                    (self._cost(node, c), i) for i, c in enumerate(found) if self._fits(node, c, taken)
                )[1]
                chosen[node.name] = found[best]
                self.layout[node.name] = found[best].outputs
                taken.setdefault(node.name, []).append((found[best].outputs[0], self.size))
                for s, need in zip(operands(node), found[best].inputs, strict=True):
                    taken.setdefault(f"{node.name}<{s.name}", []).append((need.placement, self.size))
            elif tensors_of(node):  # a projection
                source = node.args[0]
                assert isinstance(source, fx.Node)
                assert isinstance(node.args[1], int)
                self.layout[node.name] = (self.layout[source.name][node.args[1]],)
        return chosen, {}

    def _fits(self, node: fx.Node, choice: Choice, taken: Mapping[str, list[tuple[Placement, int]]]) -> bool:
        for key, value, placement in (
            *(
                (f"{node.name}<{s.name}", s.meta["val"], n.placement)
                for s, n in zip(operands(node), choice.inputs, strict=True)
            ),
            *((node.name, v, p) for v, p in zip(tensors_of(node), choice.outputs, strict=True)),
        ):
            if not isinstance(placement, Shard):
                continue
            cut = math.prod(
                n for p, n in taken.get(key, ()) if isinstance(p, Shard) and p.dim == placement.dim
            )
            size = value.shape[placement.dim]
            if isinstance(size, int) and size % (self.size * cut):
                return False
        return all(count % self.size == 0 for count in choice.divides)

    def _cost(self, node: fx.Node, choice: Choice) -> float:
        cost = 0.0
        for source, need in zip(operands(node), choice.inputs, strict=True):
            now = self.layout[source.name][0]
            elements = math.prod(min(s, 64) for s in shape(source.meta["val"]))
            if now != need.placement and not (now == R and isinstance(need.placement, Shard)):
                cost += elements * (2 if now == P else 1)
        module = str(node.meta["module_path"])
        pins = self.forced.values.items()
        wanted = next(
            (p for g, p in pins if fnmatch.fnmatch(node.name, g) or fnmatch.fnmatch(module, g)), None
        )
        if wanted is not None and choice.outputs[0] not in (wanted, P):
            cost += 1e6
        sharded = sum(isinstance(p, Shard) for p in choice.outputs)
        return cost - 0.5 * sharded
