"""Runs of nccl-tests: read in all their forms, checked by the factor of the collective, and turned into rates of links."""

from __future__ import annotations

import pytest

from cost_models.conversion import group_links
from cost_models.errors import ClusterError
from cost_models.from_machines.combine import Chosen, FoundCluster, Readings, found_cluster
from cost_models.from_machines.nccl_tests import read_nccl_tests
from cost_models.from_machines.nccl_topology import read_nccl_topology
from cost_models.from_machines.seen import ToolText
from cost_models.from_machines.topo_matrix import read_topo
from tests.unit.cost_models.from_machines.forms import full, matrix
from tests.unit.cost_models.from_machines.rate_forms import H100, TESTS, UNITS, WIDE, G, run
from tests.unit.cost_models.from_machines.xml_forms import NCCL


@pytest.mark.parametrize("name", TESTS)
def test_a_run_is_read(name: str) -> None:
    text, runs = TESTS[name]
    rates = read_nccl_tests(ToolText.of("tests.txt", text))
    assert [(rate.collective, rate.ranks, len(rate.per_host)) for rate in rates] == runs


def test_the_largest_message_counts_in_and_out_of_place() -> None:
    (rate,) = read_nccl_tests(ToolText.of("tests.txt", TESTS["eight h100"][0]))
    assert (rate.size_bytes, rate.source) == (16 * G, "tests.txt, line 18")
    assert rate.algorithm_rate == pytest.approx(274.2e9 * 1.005, rel=1e-4)
    assert rate.bus_rate == pytest.approx(1.75 * rate.algorithm_rate, rel=1e-3)


@pytest.mark.parametrize(
    ("text", "where", "cause"),
    [
        ("", "tests.txt", "it has no row below a line with size"),
        (
            run("all_reduce", H100, {G: 200.0}).replace(" 350.00 ", " fast "),
            "line 16",
            "busbw: expected GB/s, got 'fast'",
        ),
        (
            run("all_reduce", H100, {G: 200.0}).replace(" 350.00 0 ", " 350.00 "),
            "line 16",
            "expected 13 values, got 12",
        ),
        (run("all_reduce", H100, {G: 200.0}).replace(" 350.00 0 ", " 350.00 7 "), "line 16", "#wrong is 7"),
        (
            run("all_reduce", {"a": 4}, {G: 200.0}).replace("#  Rank  3", "#  rank 3"),
            "line 12",
            "busbw is 1.500 of algbw, but 1.333",
        ),
        (run("all_gather", H100, {G: 200.0}, named=False), "line 15", "no line names the collective"),
        (TESTS["old all-gather"][0].replace(" 0e+00\n", "\n"), "line 15", "expected 11 values, got 10"),
        (
            "# broadcast_perf\n" + WIDE + "\n1073741824 1 float none 0 1 2.00 2.00 0 1 2.00 2.00 0\n",
            "line 3",
            "how many ranks",
        ),
        (run("all_reduce", H100, {G: 0.0}), "line 16", "the largest message has a bandwidth of 0"),
    ],
)
def test_what_is_no_run_is_refused_with_its_line(text: str, where: str, cause: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read_nccl_tests(ToolText.of("tests.txt", text))
    assert where in caught.value.what
    assert cause in caught.value.because[0]
    assert caught.value.suggestions


def measured(*texts: str, word: str = "NV18", device: str = "H100-80GB", **chosen: object) -> FoundCluster:
    rates = [rate for text in texts for rate in read_nccl_tests(ToolText.of("tests.txt", text))]
    topo = read_topo(ToolText.of("topo.txt", matrix(full(word, 8))))
    return found_cluster(Readings(topo, rates=rates), Chosen(device, **chosen))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("collective", "hosts", "rate", "word", "device"),
    [
        ("all_reduce", {"a": 8}, 274.0, "NV18", "H100-80GB"),  # in the switch
        ("all_reduce", {"a": 8}, 190.0, "NV18", "H100-80GB"),  # by rings, with the switch's sums off
        ("all_gather", {"a": 8}, 380.0, "NV18", "H100-80GB"),
        ("reduce_scatter", {"a": 8}, 20.0, "SYS", "L40S"),
        ("all_reduce", {"a": 8}, 8.0, "PHB", "RTX4090"),
        ("all_reduce", {"a": 8, "b": 8}, 180.0, "NV18", "H100-80GB"),
        ("all_reduce", {"a": 8, "b": 8, "c": 8, "d": 8}, 180.0, "NV18", "H100-80GB"),
        ("all_gather", {"a": 8, "b": 8}, 190.0, "NV12", "A100-80GB"),
    ],
)
def test_the_cluster_predicts_what_was_measured(
    collective: str, hosts: dict[str, int], rate: float, word: str, device: str
) -> None:
    """Of the run itself, to the start of a collective, which bandwidths do not say."""
    size = 16 * G
    found = measured(run(collective, hosts, {size: rate}), word=word, device=device)
    links = group_links([range(found.spec.world_size)], found.spec)
    assert found.spec.world_size == 8 * len(hosts)
    assert links.seconds(collective, size) == pytest.approx(size / (rate * 1.005e9), rel=0.06)  # type: ignore[arg-type]


def test_sums_in_a_switch_are_no_speed_of_wires() -> None:
    text = str(measured(run("all_reduce", H100, {16 * G: 274.0})))
    assert (
        "        in_network: 275.37GB/s  # tests.txt, line 16: all_reduce of 8, busbw 482 GB/s by sums"
        in text
    )
    assert "rings" not in text
    assert "      preset: NVSwitch" in text


def test_a_message_from_device_to_device_keeps_the_rings_of_the_preset() -> None:
    found = measured(run("sendrecv", {"a": 2}, {G: 20.0}), word="SYS", device="L40S")
    link = found.spec.links["a/port0/out"]
    assert link.bandwidth_bytes_per_second == pytest.approx(20.1e9, rel=1e-3)
    assert link.rings is not None
    assert link.rings.reached(8) == 13.9e9


def test_small_messages_and_other_collectives_are_named() -> None:
    found = measured(run("all_gather", H100, {2**27: 300.0}), run("broadcast", H100, {G: 300.0}))
    assert [str(each).partition(" (")[0] for each in found.missing] == [
        "the rate of large messages: that of 128 MiB",
        "a use of broadcast_perf on 1 hosts",
    ]


def test_measured_cards_replace_line_rates() -> None:
    rates = read_nccl_tests(ToolText.of("tests.txt", run("all_gather", {"a": 4, "b": 4}, {G: 180.0})))
    nccl = read_nccl_topology(ToolText.of("topo.xml", NCCL["h100"][0]))
    found = found_cluster(Readings(nccl=nccl, rates=rates), Chosen())
    network = found.spec.network
    assert network is not None
    assert (network.preset, network.bandwidth) == (
        "InfiniBand-NDR",
        pytest.approx(180.9e9 * 7 / 8 / 4, rel=1e-3),
    )
    assert [device.host for device in found.spec.devices] == ["a"] * 4 + ["b"] * 4


def test_a_run_alone_names_hosts_and_gpus() -> None:
    (rate,) = read_nccl_tests(ToolText.of("tests.txt", TESTS["two hosts"][0]))
    found = found_cluster(Readings(rates=[rate]), Chosen())
    assert {device.host for device in found.spec.devices} == {"worker-1", "worker-0"}
    assert {device.model for device in found.spec.devices} == {"H100-80GB"}
    assert UNITS in TESTS["two hosts"][0]
