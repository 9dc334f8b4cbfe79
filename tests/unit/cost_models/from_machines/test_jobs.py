"""Nodes of a job: SLURM's lists in their own order, counts by node, torchrun's variables, switches of topology.conf."""

from __future__ import annotations

import pytest

from cost_models.errors import ClusterError
from cost_models.from_machines.combine import Chosen, FoundCluster, Readings, found_cluster
from cost_models.from_machines.host_lists import read_counts, read_hosts, write_hosts
from cost_models.from_machines.jobs import read_job
from cost_models.from_machines.seen import ToolText
from cost_models.from_machines.switches import read_switches
from cost_models.from_machines.topo_matrix import read_topo
from tests.unit.cost_models.from_machines.forms import CUBE, full, matrix
from tests.unit.cost_models.from_machines.job_forms import JOBS, TOPOLOGIES


def job_text(text: str) -> ToolText:
    return ToolText.of("job.env", text)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_read(name: str) -> None:
    text, nodes, hosts, counts = JOBS[name]
    job = read_job(job_text(text))
    assert (job.nodes, write_hosts(job.hosts), job.counts) == (nodes, hosts, counts)


@pytest.mark.parametrize(
    ("text", "names", "written"),
    [
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"], ["node[01-03,07]"]),
        ("node[9-11]", ["node9", "node10", "node11"], ["node[9-11]"]),
        ("node[03,01-02]", ["node03", "node01", "node02"], ["node[03,01-02]"]),
        ("a,b2,b3,c-1-x,c-2-x", ["a", "b2", "b3", "c-1-x", "c-2-x"], ["a", "b[2-3]", "c-[1-2]-x"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"], ["r1n[01-02]", "r2n[01-02]"]),
        ("n[099-101]", ["n099", "n100", "n101"], ["n[099-101]"]),
        ("n[98-99],n[100-101]", ["n98", "n99", "n100", "n101"], ["n[98-101]"]),
    ],
)
def test_lists_of_hosts_keep_their_order(text: str, names: list[str], written: list[str]) -> None:
    assert list(read_hosts(text)) == names
    assert write_hosts(names) == written
    assert [name for pattern in written for name in read_hosts(pattern)] == names


@pytest.mark.parametrize("text", ["", "a,,b", "a[1-", "a]", "a[3-1]", "a[x]", "a,a", "a b", "n[1-99999999]"])
def test_what_is_no_list_of_hosts_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        read_hosts(text)


def test_counts_repeat() -> None:
    assert read_counts("8(x4),4") == (8, 8, 8, 8, 4)
    for text in ("", "8x4", "8(x0)", "0", "8,"):
        with pytest.raises(ValueError, match="counts such as"):
            read_counts(text)


@pytest.mark.parametrize(
    ("text", "where", "cause"),
    [
        ("", "job.env", "it has neither SLURM_JOB_NODELIST nor torchrun's variables"),
        ("A=1\nSLURM_JOB_NODELIST=n[1-\n", "line 2", "SLURM_JOB_NODELIST: expected a list"),
        (
            "SLURM_JOB_NODELIST=n[1-2]\nSLURM_TASKS_PER_NODE=8(x3)\n",
            "line 2",
            "SLURM_TASKS_PER_NODE is of 3 nodes, the job has 2",
        ),
        (
            "SLURM_JOB_NODELIST=n[1-2]\nSLURM_GPUS_PER_NODE=h100\n",
            "line 2",
            "SLURM_GPUS_PER_NODE: expected counts",
        ),
        ("SLURM_HET_SIZE=2\n", "line 1", "a job of several groups"),
        ("PET_NNODES=2:4\n", "line 1", "PET_NNODES is 2:4, but a plan is for one number of nodes"),
        ("PET_NNODES=none\n", "line 1", "PET_NNODES: expected a number from 1, got 'none'"),
        ("WORLD_SIZE=10\nLOCAL_WORLD_SIZE=4\n", "line 1", "WORLD_SIZE is 10, no multiple of 4"),
    ],
)
def test_what_is_no_job_is_refused_with_its_line(text: str, where: str, cause: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read_job(job_text(text))
    assert where in caught.value.what
    assert cause in caught.value.because[0]
    assert caught.value.suggestions


def of_job(
    text: str, topology: str | None = None, rows: list[str] | None = None, device: str = "H100-80GB"
) -> FoundCluster:
    seen = Readings(
        read_topo(ToolText.of("topo.txt", matrix(rows or full("NV18", 8)))),
        job=read_job(job_text(text)),
        switches=read_switches(ToolText.of("topology.conf", topology)) if topology else (),
    )
    return found_cluster(seen, Chosen(device, "InfiniBand-NDR"))


def test_ranks_follow_the_order_of_the_job() -> None:
    found = of_job("SLURM_JOB_NODELIST=n[07,01-02]\nSLURM_TASKS_PER_NODE=8(x2),4\n")
    devices = found.spec.devices
    assert [devices[rank].host for rank in (0, 8, 16)] == ["n07", "n01", "n02"]
    assert len(devices) == 20
    assert "  - name: n[07,01]  # job.env, line 1, SLURM_JOB_NODELIST" in str(found)
    assert "    count: 4  # job.env, line 2, SLURM_TASKS_PER_NODE" in str(found)


def test_a_part_of_a_machine_has_the_wires_of_its_first_gpus() -> None:
    found = of_job("PET_NNODES=2\nPET_NPROC_PER_NODE=4\n", rows=CUBE, device="V100-32GB")
    (node,) = found.spec.nodes
    assert node.links is not None
    assert [pair.between for pair in node.links.pairs] == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]


def test_a_job_with_more_gpus_than_the_machine_is_refused() -> None:
    with pytest.raises(
        ClusterError, match=r"topo.txt, line 1 has 2 GPUs, job.env, line 2, SLURM_GPUS_PER_NODE 8"
    ):
        of_job("SLURM_JOB_NODELIST=n[1-2]\nSLURM_GPUS_PER_NODE=8\n", rows=full("NV18", 2))


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_switches_are_read(name: str) -> None:
    text, names = TOPOLOGIES[name]
    assert [switch.name for switch in read_switches(ToolText.of("topology.conf", text))] == names


def test_switches_of_other_nodes_are_left_out() -> None:
    leaves = [f"SwitchName=s{i} Nodes=n[{4 * i}-{4 * i + 3}]\n" for i in range(3)]
    topology = "".join([*leaves, "SwitchName=top Switches=s[0-2]\n"])
    found = of_job("SLURM_JOB_NODELIST=n[2-5]\nSLURM_GPUS_PER_NODE=8\n", topology)
    assert found.spec.network is not None
    assert [(switch.name, switch.members) for switch in found.spec.network.switches] == [
        ("s0", ("n[2-3]",)),
        ("s1", ("n[4-5]",)),
        ("top", ("s[0-1]",)),
    ]
    assert any("oversubscription" in str(each) for each in found.missing)
    with pytest.raises(ClusterError, match="n12 of the job is behind no switch"):
        of_job("SLURM_JOB_NODELIST=n[11-12]\nSLURM_GPUS_PER_NODE=8\n", topology)


@pytest.mark.parametrize(
    ("text", "where", "cause"),
    [
        ("# nothing\n", "topology.conf", "it names no switch"),
        ("\nNodes=n1\n", "line 2", "expected SwitchName=… with Nodes=… or Switches=…"),
        ("SwitchName=s0 Nodes=n[1-\n", "line 1", "expected a list"),
        ("SwitchName=s0 Nodes=n1\nSwitchName=s0 Nodes=n2\n", "line 2", "the switch s0 is there twice"),
        (
            "SwitchName=s0 Nodes=n1\nSwitchName=s1 Nodes=n1\n",
            "line 2",
            "n1 is behind s1, and behind s0 (line 1)",
        ),
        ("SwitchName=s0 Switches=s1\n", "line 1", "there is no switch s1"),
        ("SwitchName=s0 Nodes=s0\n", "line 1", "s0 is a switch, not a node"),
        ("SwitchName=s0 Switches=s1\nSwitchName=s1 Switches=s0\n", "line 1", "s0 is behind itself"),
        ("BlockName=b1 Nodes=n[1-18]\n", "line 1", "it is of blocks"),
    ],
)
def test_what_is_no_switch_is_refused_with_its_line(text: str, where: str, cause: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read_switches(ToolText.of("topology.conf", text))
    assert where in caught.value.what
    assert cause in caught.value.because[0]
    assert caught.value.suggestions
