"""Comparison of the first batches between ranks: data that differ would train on garbage without a word.

Loaders that shuffle by themselves on each rank are the usual reason: one rank embeds the tokens of some samples, another
compares the result with the labels of others. What a rank was given of a batch becomes one number per tensor (a hash of
at most SAMPLED elements), and one small all-reduce finds the largest and smallest of each. Ranks that load parts of a
batch compare with those that load the same part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from cost_models.errors import UsageError
from runtime.ranks.collective import Collectives

SAMPLED = 1 << 16
"""Elements of a tensor that are looked at, spread over all of it."""
_NOT_HERE = -(2**63)
"""The number that stands for a tensor that this rank was not given."""


class BatchCheck:
    """Compares ``steps`` batches, then costs nothing. ``names``: the leaves of a user's batch, alike on every rank.

    ``parts``: the number of parts that a batch may be loaded in.
    """

    def __init__(self, names: Sequence[str], collectives: Collectives, steps: int, parts: int = 1) -> None:
        self._names, self._collectives, self._steps = tuple(names), collectives, steps
        self._parts = range(parts) if parts > 1 else range(0)
        self._what = [
            "samples",
            "parts",
            *self._names,
            *(f"{name} of part {part}" for part in self._parts for name in self._names),
        ]
        self._left = 0
        self.rearm()

    def rearm(self) -> None:
        """Compare the next batches as if they were the first: something may have changed what is loaded."""
        self._left = self._steps if len(self._collectives.ranks) > 1 else 0

    def __call__(self, leaves: Mapping[str, Tensor], samples: int, part: int | None = None) -> None:
        """Compare a batch. Collective. Raises UsageError, on every rank, where ``samples`` or a tensor differs.

        ``part``: the number of the part that ``leaves`` are; None where they are of the whole batch.
        """
        if self._left <= 0:
            return
        self._left -= 1
        mine: list[int | None] = [samples, None]
        if leaves:
            mine[1] = 1 if part is None else len(self._parts)
        for number in (None, *self._parts):
            for name in self._names:
                mine.append(digest(leaves[name]) if number == part and name in leaves else None)
        lanes = [lane for value in mine for lane in _lanes(value)]
        found = self._reduced(lanes, dist.ReduceOp.MAX)
        differing = [
            at
            for at, (highest, lowest) in enumerate(zip(found[::2], found[1::2], strict=True))
            if highest != _NOT_HERE and highest != -lowest
        ]
        if differing:
            self._refuse(mine, differing)

    def _refuse(self, mine: Sequence[int | None], differing: Sequence[int]) -> None:
        """Find out which rank has what, and say so."""
        ranks = self._collectives.ranks
        rows = [0] * (len(ranks) * len(mine))
        own = dist.get_rank()
        rows[own * len(mine) : (own + 1) * len(mine)] = [-1 if value is None else value for value in mine]
        table = self._reduced(rows, dist.ReduceOp.SUM)
        because = []
        for at in differing:
            values = {r: table[r * len(mine) + at] for r in ranks if table[r * len(mine) + at] >= 0}
            if at < 2:
                counts = ", ".join(f"{count} on rank {rank}" for rank, count in values.items())
                because.append(f"{self._what[at]}: {counts}")
                continue
            alike: dict[int, list[int]] = {}
            for rank, value in values.items():
                alike.setdefault(value, []).append(rank)
            groups = "; another on ".join(_named(ranks) for ranks in alike.values())
            because.append(f"{self._what[at]}: one on {groups}")
        raise UsageError(
            "ranks were given different batches",
            because,
            [
                "engine.dataloader(dataset) loads the same batches in the same order on every rank",
                "leave out the tensors that a rank does not read, rather than filling them with something",
                "deploy(check_batches=0) compares nothing",
            ],
        )

    def _reduced(self, numbers: Sequence[int], op: dist.ReduceOp.RedOpType) -> list[int]:
        vector = torch.tensor(numbers, dtype=torch.int64, device=self._collectives.device)
        reduced: list[int] = (
            self._collectives.all_reduce(vector, "the comparison of batches", op).wait().tolist()
        )
        return reduced


def _lanes(value: int | None) -> tuple[int, int]:
    """Return two numbers whose maxima over ranks are the largest value and minus the smallest."""
    return (_NOT_HERE, _NOT_HERE) if value is None else (value, -value)


def _named(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"


def digest(tensor: Tensor) -> int:
    """Hash shape, type and elements to 62 bits; the same on every machine with the same byte order."""
    with torch.no_grad():
        plain = tensor.detach()
        plain = (plain if plain.layout == torch.strided else plain.to_dense()).resolve_conj().resolve_neg()
        flat = plain.reshape(-1) if plain.numel() <= SAMPLED else _spread(plain)
        data = flat.cpu().contiguous().view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    shape = f"{tuple(tensor.shape)} {tensor.dtype}".encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8, key=shape[:64]).digest(), "little") >> 2


def _spread(tensor: Tensor) -> Tensor:
    """Return SAMPLED elements (or a few more) at even distances; the whole is not copied where it is contiguous."""
    step = tensor.numel() // SAMPLED | 1  # odd, so that rows of a power of two are not met at one column only
    return tensor.reshape(-1)[::step]
