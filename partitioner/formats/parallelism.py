"""The parallelism of a training step in the degrees that training frameworks share."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from cost_models.errors import UsageError
from cost_models.units import counted
from passes.search.hybrid.fix import Fix
from passes.search.words import RecomputeMode

Zero = Literal[0, 1, 3]


@dataclass(frozen=True)
class Parallelism:
    """The degrees of a step: ``pipeline`` groups of ``data`` × ``tensor`` devices.

    Ranks are numbered as torchtitan's and our groups are: the pipeline is outermost, tensor parallelism innermost.
    """

    pipeline: int = 1
    """Groups of devices, one behind the other."""
    chunks: int = 1
    """Stages that each group runs: more than one under an interleaved schedule."""
    tensor: int = 1
    """Devices that share each op's neurons."""
    sequence: bool = False
    """True if these hold activations between products by parts of the positions."""
    data: int = 1
    """Replicas: devices that have their own samples."""
    zero: Zero = 0
    """0: replicas keep everything; 1: each a part of the optimizer's state; 3: of the parameters too."""
    microbatch: int = 1
    """Samples of a micro-batch on each replica."""
    microbatches: int = 1
    """Micro-batches of a step."""
    schedule: str = "1f1b"
    """Name of the schedule, one of ``runtime.schedules.SCHEDULES``."""
    recompute: RecomputeMode = "none"
    """``auto``: some blocks of a stage, where memory asks for it."""
    layers: tuple[int, ...] = ()
    """Blocks of each stage, in the order of the model; () where nothing is said of them."""

    @property
    def world_size(self) -> int:
        """Number of devices."""
        return self.pipeline * self.data * self.tensor

    @property
    def batch_size(self) -> int:
        """Samples of a step."""
        return self.microbatch * self.data * self.microbatches

    def fix(self, modules: Sequence[str] = ()) -> Fix:
        """Return the same for the hybrid search: what ``--fix`` takes.

        ``modules``: the model's, as :func:`units_of` has them; without them, or without ``layers``, borders are left open.
        """
        return Fix(
            pipeline=self.pipeline,
            interleave=self.chunks if self.chunks > 1 else None,
            tensor=None if self.sequence else self.tensor,
            sequence=self.tensor if self.sequence else None,
            data=self.data,
            zero=self.zero if self.data > 1 else None,
            microbatch=self.microbatch,
            recompute=self.recompute,
            borders=self.borders(modules) if self.pipeline > 1 and self.layers and modules else None,
        )

    def borders(self, modules: Sequence[str]) -> tuple[str, ...]:
        """Return the first module of every stage but the first. Raises UsageError for other numbers of blocks."""
        blocks = [index for index, name in enumerate(modules) if is_block(name)]
        if sum(self.layers) != len(blocks):
            raise UsageError(
                f"cannot divide the model's {counted(len(blocks), 'block')} so",
                [f"stages of {'+'.join(map(str, self.layers))} = {sum(self.layers)} blocks"],
            )
        behind = [modules[index] for index in blocks] + list(modules[blocks[-1] + 1 :][:1])
        starts = list(accumulate(self.layers))[:-1]
        if len({0, *starts}) <= len(starts) - (self.layers[0] == 0) or starts[-1] >= len(behind):
            raise UsageError(
                "cannot plan an empty stage", [f"stages of {'+'.join(map(str, self.layers))} blocks"]
            )
        return tuple(behind[start] for start in starts)


def units_of(paths: Iterable[str]) -> list[str]:
    """Return the unit of each module path: its outermost numbered module (a block), else itself; "" for what holds others.

    ["", "embed", "h.0", "h.0.mlp", "h.1.mlp", "norm"]   ->   ["", "embed", "h.0", "h.0", "h.1", "norm"]
    """
    known = list(paths)
    around = {"", *(parent for path in known for parent in _parents(path))}
    return [_unit(path, around) for path in known]


def _parents(path: str) -> Iterator[str]:
    words = path.split(".")
    return (".".join(words[:count]) for count in range(1, len(words)))


def _unit(path: str, around: Collection[str]) -> str:
    words = path.split(".")
    numbered = next((count for count, word in enumerate(words, 1) if word.isdigit()), None)
    if numbered is not None:
        return ".".join(words[:numbered])
    return "" if path in around else path


def is_block(name: str) -> bool:
    """Tell whether a unit is one of several numbered modules."""
    return name.rpartition(".")[2].isdigit()
