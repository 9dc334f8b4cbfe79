"""Blocks: the pieces of a model that recompute keeps the inputs of, such as the layers of a transformer.

    model.layers.0.self_attn.q_proj   ─►  model.layers.0
    model.layers.0.mlp.up_proj        ─►  model.layers.0          model.embed_tokens, lm_head, loss  ─►  no block

A *container* is a module whose numbered children repeat: what one of them runs, more than a few ops, another runs as
well, on tensors of the same shapes. The children of the outermost containers are the blocks, unlike ones (a first layer
that also makes a bias, or shrinks the image) too. Where those hold less than half of the ops, shapes may differ (the
stages of a small ResNet); a model without any repetition has its outermost modules that run more than a few ops.

A block is a run of consecutive ops: a module that is called several times gives a block per call, ``cell``, ``cell#1``,
``cell#2``, …. So the ops of a block that share a stage can be run as one call, whatever else the stage holds: in a
topological order nothing leads out of a run and back into it.

Beside these there is ``GATHERS``: the layers that multiply a value by parameters, such as those that make query, key
and value. Backward computes nothing of such a block again, since all that a product saves are its operands; but what
was gathered for it (ZeRO-3's parameters) is gathered again, instead of being kept from forward to backward (of
sequence parallelism the products' input, too).

And ``SELECTIVE``: between two products with parameters, the ops from the first product of two activations to the last: the
scores of an attention, their softmax, its dropout (Korthikanti et al. 2022, section 5). An attention that is one fused op
keeps no scores, and is none.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from torch import fx

from passes.graph.graph import OpGraph, once_per_graph
from passes.graph.recomputed import recomputed_ops
from runtime.ops.products import CONVOLUTIONS, PRODUCTS, aten, is_factor

MULTIPLYING = PRODUCTS | CONVOLUTIONS
FEWEST_OPS = 4
"""Fewer than this in a block save nothing worth the recompute: its result is kept by whoever reads it."""
GATHERS = "gathers"
"""Stands among a stage's blocks for its products with parameters, those of one value together, that are in no other."""
SELECTIVE = "selective"
"""Stands among a stage's blocks for its attentions that are in no other of them."""
NEIGHBOURS = 4
"""A child is compared with this many others of its size or larger."""


@once_per_graph
def block_of(graph: OpGraph) -> Mapping[str, str]:
    """Return the block of each op that is in one, by op name, in the order of the model's code.

    Ops that every stage runs for itself (``passes.graph.recomputed``) are in none.
    """
    cheap = recomputed_ops(graph)
    ops = [node for node in graph.ops if node.name not in cheap]
    paths = [str(node.meta.get("module_path", "")) for node in ops]
    found: dict[str, str] = {}
    for same_shapes in (True, False):
        containers = _containers(ops, paths, same_shapes)
        other = _runs(ops, [_child_of_container(path, containers) for path in paths])
        found = max(found, other, key=len)
        if 2 * len(found) >= len(ops):
            break
    return found or _runs(ops, _outermost(paths))


def _containers(ops: Sequence[fx.Node], paths: Sequence[str], same_shapes: bool) -> frozenset[str]:
    """Return the paths of modules whose numbered children repeat."""
    inside: defaultdict[str, list[tuple[str, fx.Node]]] = defaultdict(list)
    for node, path in zip(ops, paths, strict=True):
        parts = path.split(".")
        for end, part in enumerate(parts, start=1):
            if part.isdigit():
                inside[".".join(parts[:end])].append((".".join(parts[end:]), node))
    structures: defaultdict[str, list[Counter[tuple[str, ...]]]] = defaultdict(list)
    for child, members in inside.items():
        if len(members) >= FEWEST_OPS:
            found: Counter[tuple[str, ...]] = Counter(
                (rest, str(node.target), _shape(node) if same_shapes else "") for rest, node in members
            )
            structures[child.rpartition(".")[0]].append(found)
    return frozenset(parent for parent, children in structures.items() if _repeats(children))


def _repeats(children: Sequence[Counter[tuple[str, ...]]]) -> bool:
    """Tell whether one child's ops are all among another's."""
    ordered = sorted(children, key=lambda child: child.total())
    return any(
        small <= large for at, small in enumerate(ordered) for large in ordered[at + 1 : at + 1 + NEIGHBOURS]
    )


def _shape(node: fx.Node) -> str:
    value = node.meta.get("val")
    return str(getattr(value, "shape", ""))


def _child_of_container(path: str, containers: frozenset[str]) -> str:
    """Return the block that ``path`` is in: the numbered child of its outermost container; "" outside of any."""
    parts = path.split(".")
    for end, part in enumerate(parts, start=1):
        if part.isdigit() and ".".join(parts[: end - 1]) in containers:
            return ".".join(parts[:end])
    return ""


def _outermost(paths: Sequence[str]) -> list[str]:
    """Return, for a model without repetition, the child that each op is in of the module that all ops are in."""
    named = [path.split(".") for path in paths if path]
    depth = 0
    while named and len({tuple(parts[: depth + 1]) for parts in named}) == 1 and len(named[0]) > depth + 1:
        depth += 1
    return [".".join(path.split(".")[: depth + 1]) for path in paths]


def _runs(ops: Iterable[fx.Node], prefixes: Iterable[str]) -> dict[str, str]:
    """Number the calls of each module, and leave out those of a few ops."""
    runs: list[tuple[str, list[str]]] = []
    for node, prefix in zip(ops, prefixes, strict=True):
        if not runs or runs[-1][0] != prefix:
            runs.append((prefix, []))
        runs[-1][1].append(node.name)
    calls: Counter[str] = Counter()
    found: dict[str, str] = {}
    for prefix, names in runs:
        if not prefix or len(names) < FEWEST_OPS:
            continue
        block = prefix if not calls[prefix] else f"{prefix}#{calls[prefix]}"
        calls[prefix] += 1
        found |= dict.fromkeys(names, block)
    return found


def regions_of(graph: OpGraph, blocks: Collection[str]) -> tuple[tuple[str, ...], ...]:
    """List the ops of each of ``blocks``, in the model's order, wherever they run."""
    found = regions_of_stages(graph, dict.fromkeys((node.name for node in graph.ops), 0), [blocks])
    return found[0] if found else ()


def regions_of_stages(
    graph: OpGraph, stage_of: Mapping[str, int], blocks: Sequence[Collection[str]]
) -> tuple[tuple[tuple[str, ...], ...], ...]:
    """List the ops of each of ``blocks`` (names per stage), per stage, in the model's order; () if no stage has any.

    A block that several stages share is a region of its own in each.
    """
    if not any(blocks):
        return ()
    members: list[dict[str, list[str]]] = [{} for _ in blocks]
    own, products, attentions = block_of(graph), _products_with_parameters(graph), attention_of(graph)
    for node in graph.ops:
        name, stage = node.name, stage_of.get(node.name, -1)
        if stage < 0:
            continue
        if own.get(name) in blocks[stage]:
            members[stage].setdefault(own[name], []).append(name)
        elif GATHERS in blocks[stage] and name in products:
            members[stage].setdefault(f"{GATHERS} {products[name]}", []).append(name)
        elif SELECTIVE in blocks[stage] and name in attentions:
            members[stage].setdefault(f"{SELECTIVE} {attentions[name]}", []).append(name)
    return tuple(tuple(tuple(names) for names in found.values()) for found in members)


@once_per_graph
def _products_with_parameters(graph: OpGraph) -> Mapping[str, str]:
    """Return the other factor of each op that saves a parameter, since that needs a gradient, and nothing but operands."""
    parameters = {given.node for given in graph.inputs if given.kind == "parameter"}
    found = {}
    for node in graph.ops:
        if node.target in MULTIPLYING:
            factors = [source.name for source in node.all_input_nodes if is_factor(node, source)]
            others = [name for name in factors if name in graph.needs_grad and name not in parameters]
            if others and parameters.intersection(factors):
                found[node.name] = others[0]
    return found


@once_per_graph
def attention_of(graph: OpGraph) -> Mapping[str, str]:
    """Return the attention of each op that is in one, named by its first op, in the order of the model's code.

    One product alone is none: it saves nothing but its operands.
    """
    found: dict[str, str] = {}
    for run in _between_parameters(graph):
        mixing = [at for at, (_, mixes) in enumerate(run) if mixes]
        if len(mixing) > 1:
            names = [name for name, _ in run[mixing[0] : mixing[-1] + 1]]
            found |= dict.fromkeys(names, names[0])
    return found


def _between_parameters(graph: OpGraph) -> Iterator[list[tuple[str, bool]]]:
    """Yield the runs of ops between two products with parameters: names, and whether they multiply two activations."""
    cheap, weights = recomputed_ops(graph), _of_parameters(graph)
    run: list[tuple[str, bool]] = []
    for node in graph.ops:
        factors = _factors(node)
        if factors & weights:
            yield run
            run = []
        elif node.name not in cheap:
            run.append((node.name, len(factors & graph.needs_grad) > 1))
    yield run


def _of_parameters(graph: OpGraph) -> frozenset[str]:
    """Name parameters, and what is computed of parameters alone."""
    found = {given.node for given in graph.inputs if given.kind == "parameter"}
    for node in graph.ops:
        if node.all_input_nodes and all(source.name in found for source in node.all_input_nodes):
            found.add(node.name)
    return frozenset(found)


def _factors(node: fx.Node) -> set[str]:
    """Name the operands that a product multiplies; nothing of other ops."""
    if node.target is aten.baddbmm.default:  # (summand, factor, factor)
        return {source.name for source in node.all_input_nodes if source is not node.args[0]}
    if node.target not in MULTIPLYING:
        return set()
    return {source.name for source in node.all_input_nodes if is_factor(node, source)}
