"""``partitioner cluster``: a cluster file from this machine, or from what tools printed on yours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from cost_models import host
from cost_models.errors import UsageError
from cost_models.files import replace_file
from cost_models.from_machines.combine import Chosen, Readings, found_cluster
from cost_models.from_machines.gpu_table import read_gpus
from cost_models.from_machines.hardware_files import read_hardware
from cost_models.from_machines.jobs import read_job
from cost_models.from_machines.nccl_tests import read_nccl_tests
from cost_models.from_machines.nccl_topology import read_nccl_topology
from cost_models.from_machines.seen import Sourced, ToolText
from cost_models.from_machines.switches import read_switches
from cost_models.from_machines.this_machine import GPUS, TOPO, printed
from cost_models.from_machines.topo_matrix import read_topo
from cost_models.units import bytes_text
from partitioner.commands.options import JsonFlag, OutputFile, QuietFlag, WholeNumber, check_output, emit


def cluster(
    *,
    topo: Path | None = None,
    gpus: Path | None = None,
    nccl_xml: Path | None = None,
    nccl_tests: Annotated[tuple[Path, ...], Parameter(consume_multiple=True, negative=())] = (),
    hardware: Path | None = None,
    job: str | None = None,
    switches: Path | None = None,
    device: str | None = None,
    nodes: WholeNumber | None = None,
    network: str | None = None,
    output: OutputFile = None,
    quiet: QuietFlag = False,
    json: JsonFlag = False,
) -> int:
    """Write a cluster file, behind each value where it comes from; what nothing says is named at its top.

    Without files it is of this machine.

    Parameters
    ----------
    topo
        What `nvidia-smi topo -m` printed.
    gpus
        What `nvidia-smi --query-gpu=name,memory.total,… --format=csv` or `nvidia-smi -L` printed.
    nccl_xml
        What NCCL or RCCL wrote with NCCL_TOPO_DUMP_FILE=FILE.
    nccl_tests
        What all_reduce_perf and its like printed, one file or several.
    hardware
        A system of AIConfigurator or a hardware_config of Primus.
    job
        What `env` printed inside a job of SLURM or torchrun; the word env for the environment of this command.
    switches
        SLURM's topology.conf.
    device
        The preset of the GPUs, where no file names them or no preset is called so.
    nodes
        How many such machines there are, where no job says it; 1 if not given.
    network
        The preset of their network cards, such as InfiniBand-NDR.
    output
        The file to write, instead of printing it.
    quiet
        Say nothing on stderr but errors.
    json
        Print one JSON object: the cluster, the source of each value, what is missing.
    """
    check_output(output)
    if nodes is not None and not 1 <= nodes <= 65536:
        raise UsageError("cannot read --nodes", [f"{nodes} is no number from 1 to 65536"])
    here = not (topo or gpus or nccl_xml or nccl_tests or hardware)
    seen = Readings(
        machine=read_topo(ToolText.load(topo)) if topo else read_topo(printed(TOPO)) if here else None,
        gpus=read_gpus(ToolText.load(gpus)) if gpus else read_gpus(printed(GPUS)) if here else (),
        nccl=read_nccl_topology(ToolText.load(nccl_xml)) if nccl_xml else None,
        rates=[rate for file in nccl_tests for rate in read_nccl_tests(ToolText.load(file))],
        hardware=read_hardware(hardware) if hardware else None,
        job=read_job(_job_text(job)) if job else None,
        switches=read_switches(ToolText.load(switches)) if switches else (),
        host_memory=Sourced(bytes_text(host.memory_bytes()), "this machine") if here else None,
    )
    found = found_cluster(seen, Chosen(device, network, nodes))
    if output is None:
        emit(str(found).rstrip("\n"), found.to_dict(), json)
        return 0
    _write(output, str(found))
    lines = [
        f"{found.spec.world_size} devices written to {output}",
        *(f"missing: {each}" for each in found.missing),
    ]
    emit("\n".join(lines), {**found.to_dict(), "path": str(output)}, json)
    return 0


def _job_text(job: str) -> ToolText:
    """Return the variables of this process for "env", else those of a file."""
    if job == "env":
        return ToolText.of(
            "the environment", "\n".join(f"{key}={value}" for key, value in sorted(os.environ.items()))
        )
    return ToolText.load(Path(job))


def _write(output: Path, text: str) -> None:
    if output.suffix not in (".yaml", ".yml"):
        raise UsageError(
            f"cannot write {output}",
            ["a cluster file with sources is YAML"],
            [f"-o {output.with_suffix('.yaml')}"],
        )
    try:
        replace_file(output, text)
    except OSError as error:
        raise UsageError(f"cannot write {output}", [error.strerror or str(error)]) from error
