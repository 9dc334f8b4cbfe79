"""Comparison of the first batches between ranks: data that differ would train on garbage without a word.

Loaders that shuffle by themselves on each rank are the usual reason: one rank embeds the tokens of some samples, another
compares the result with the labels of others. What a rank was given of a batch becomes one number per tensor (a hash of
at most SAMPLED elements), and one small all-reduce tells every rank the numbers of all. Ranks that load parts of a batch
compare with those that load the same part.
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
_NOT_HERE = -1
"""The number that stands for a tensor that this rank was not given."""


class BatchCheck:
    """Compares ``steps`` batches, then costs nothing. ``names``: the leaves of a user's batch, alike on every rank.

    ``parts``: the number of parts that a batch may be loaded in.
    """

    def __init__(self, names: Sequence[str], collectives: Collectives, steps: int, parts: int = 1) -> None:
        self._names, self._collectives, self._steps, self._parts = tuple(names), collectives, steps, parts
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
        parts = self._parts if part is not None else 1
        digests = [digest(leaves[name]) if name in leaves else _NOT_HERE for name in self._names]
        whole = _NOT_HERE if part is None else part
        rows = self._rows([samples, parts if leaves else _NOT_HERE, whole, *digests])
        because = []
        for at, what in enumerate(("samples", "parts")):
            counts = {rank: row[at] for rank, row in rows.items() if row[at] != _NOT_HERE}
            if len(set(counts.values())) > 1:
                because.append(
                    f"{what}: " + ", ".join(f"{count} on rank {rank}" for rank, count in counts.items())
                )
        for number in sorted({row[2] for row in rows.values()}):
            for at, name in enumerate(self._names, 3):
                alike: dict[int, list[int]] = {}
                for rank, row in rows.items():
                    if row[2] == number and row[at] != _NOT_HERE:
                        alike.setdefault(row[at], []).append(rank)
                if len(alike) > 1:
                    groups = "; another on ".join(map(_named, alike.values()))
                    of_part = "" if number == _NOT_HERE else f" of part {number}"
                    because.append(f"{name}{of_part}: one on {groups}")
        if because:
            raise UsageError(
                "ranks were given different batches",
                because,
                [
                    "engine.dataloader(dataset) loads the same batches in the same order on every rank",
                    "leave out the tensors that a rank does not read, rather than filling them with something",
                    "deploy(check_batches=0) compares nothing",
                ],
            )

    def _rows(self, mine: Sequence[int]) -> dict[int, list[int]]:
        """Return the numbers that each rank has."""
        ranks = self._collectives.ranks
        table = torch.zeros((len(ranks), len(mine)), dtype=torch.int64)
        table[ranks.index(dist.get_rank())] = torch.tensor(mine, dtype=torch.int64)
        summed = self._collectives.all_reduce(
            table.to(self._collectives.device), "the comparison of batches"
        ).wait()
        return dict(zip(ranks, summed.tolist(), strict=True))


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
