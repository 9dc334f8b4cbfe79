"""The outputs of `nvidia-smi` on this machine."""

from __future__ import annotations

import shutil
import subprocess

from cost_models.errors import ClusterError
from cost_models.from_machines.gpu_table import QUERY
from cost_models.from_machines.seen import ToolText

TOPO = ("nvidia-smi", "topo", "-m")
GPUS = ("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv")
_SECONDS = 60.0
"""A driver that answers later is not well."""


def printed(command: tuple[str, ...]) -> ToolText:
    """Return what a command of nvidia-smi prints here; ``ClusterError`` where it fails or is not there."""
    name = " ".join(command)
    if shutil.which(command[0]) is None:
        raise ClusterError(
            "cannot describe this machine",
            ["nvidia-smi is not here"],
            [
                "on the machine with the GPUs: nvidia-smi topo -m > topo.txt; nvidia-smi -L > gpus.txt; "
                "here: --topo topo.txt --gpus gpus.txt",
                "this machine's CPU is a cluster of its own: partitioner plan … --cluster local:2",
            ],
        )
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_SECONDS, check=False, errors="replace"
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise ClusterError(f"cannot run {name}", [str(error)]) from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise ClusterError(f"cannot run {name}", [said[0] if said else f"it ends with {done.returncode}"])
    return ToolText.of(f"`{name}`" if command is TOPO else "`nvidia-smi --query-gpu`", done.stdout)
