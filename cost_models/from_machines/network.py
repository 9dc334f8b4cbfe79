"""The ``network`` between nodes: how many cards serve a node's GPUs, and how fast each is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cost_models.errors import ClusterError
from cost_models.from_machines.measured_links import card_rate
from cost_models.from_machines.nccl_tests import MeasuredRate
from cost_models.from_machines.seen import GpuWiring, Missing, NetworkCard, Sourced
from cost_models.spec.fields import did_you_mean
from cost_models.spec.presets import LINKS

_LINK = {
    (True, 100): "InfiniBand-EDR",
    (True, 200): "InfiniBand-HDR",
    (True, 400): "InfiniBand-NDR",
}
"""The preset of a card by (is InfiniBand, Gb/s)."""
_LATENCY = Sourced(LINKS["InfiniBand-NDR"]["latency"], "of a network in NCCL's table, src/graph/tuning.cc")


def network_of(
    machine: GpuWiring | None,
    chosen: str | None,
    described: Mapping[str, Sourced],
    rates: Sequence[MeasuredRate],
    missing: list[Missing],
) -> dict[str, Any]:
    """Return ``network``; ``chosen`` is the preset that the user names, ``described`` what a hardware file says.

    What was measured counts before all others, then ``chosen``, the speed of cards that were seen, ``described``.
    """
    if chosen is not None and chosen not in LINKS:
        raise ClusterError(
            f'there is no link preset "{chosen}"{did_you_mean(chosen, LINKS)}',
            suggestions=["docs/presets.md lists them"],
        )
    cards = _serving(machine)
    many = {key: described[key] for key in ("cards", "per") if key in described}
    many = _cards(machine, cards, missing) if cards or not many else many
    number = many["cards"].value if "cards" in many else int(many["per"].value == "node")
    measured = card_rate(rates, number, missing)
    reached = {} if measured is None else {"bandwidth": measured}
    if chosen is not None:
        return {"preset": Sourced(chosen, "--network"), **reached, **many}
    if (not cards or cards[0].bits_per_second is None) and described:
        return {**described, **reached, **many}
    if (not cards or cards[0].bits_per_second is None) and measured is not None:
        return {**reached, "latency": _LATENCY, **many}
    if not cards or cards[0].bits_per_second is None:
        raise ClusterError(
            "cannot tell how fast the nodes reach each other",
            ["no file says the speed of their network cards"],
            [
                "--network PRESET, such as InfiniBand-NDR or Ethernet-100G",
                "--nccl-xml FILE, which NCCL writes with NCCL_TOPO_DUMP_FILE=FILE",
                "--nccl-tests FILE, of a run on two of them or more",
            ],
        )
    assert machine is not None
    return {**_link(cards, machine.count), **reached, **many}


def _serving(machine: GpuWiring | None) -> tuple[NetworkCard, ...]:
    """Return the cards that GPUs reach without the CPU, all where there is none such; of these the fastest."""
    cards = tuple(machine.cards) if machine is not None else ()
    cards = tuple(card for card in cards if card.near) or cards
    fastest = max((card.bits_per_second or 0 for card in cards), default=0)
    return tuple(card for card in cards if (card.bits_per_second or 0) == fastest)


def _cards(
    machine: GpuWiring | None, cards: tuple[NetworkCard, ...], missing: list[Missing]
) -> dict[str, Any]:
    """Say how many cards a node has."""
    if machine is None or not cards:
        where = "nvidia-smi names cards of InfiniBand and RoCE only" if machine else "--topo FILE says it"
        missing.append(Missing("network cards of a node: one for all its GPUs", where))
        return {"per": Sourced("node", "no file names a card")}
    near = "near a GPU" if cards[0].near else "none near a GPU"
    source = f"{cards[0].source}: {len(cards)} {near}, {cards[0].name}{' …' if len(cards) > 1 else ''}"
    if len(cards) >= machine.count:
        return {"per": Sourced("device", source)}
    return {"cards": Sourced(len(cards), source)}


def _link(cards: tuple[NetworkCard, ...], gpus: int) -> dict[str, Any]:
    """Return the preset of a card, else its line rate with NCCL's latency of a network. More cards than GPUs add up."""
    card = cards[0]
    assert card.bits_per_second is not None
    each = max(1, len(cards) // gpus)
    gigabits = card.bits_per_second / 1e9
    source = f"{card.source}: {card.name} at {gigabits:g} Gb/s"
    preset = _LINK.get((bool(card.is_infiniband), round(gigabits)))
    if preset is not None and each == 1:
        return {"preset": Sourced(preset, source)}
    line = "its line rate" if each == 1 else f"the line rate of {each} for each GPU"
    return {
        "bandwidth": Sourced(f"{each * gigabits:g}Gb/s", f"{source}, {line}"),
        "latency": _LATENCY,
    }
