"""Real text that is on every machine: the Python standard library's own sources, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from partitioner import Workload

SEQUENCE = 64

logging.set_verbosity_error()  # its remarks on a random model's configuration would drown the demo's own words


def standard_library(limit_bytes: int = 4_000_000) -> torch.Tensor:
    """The first ``limit_bytes`` of all top-level modules, in order of name; uint8."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit_bytes:
            break
    return torch.frombuffer(text[:limit_bytes], dtype=torch.uint8).clone()


def batches(batch_size: int, steps: int, seed: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """Random windows of the text; the same on every rank for the same seed."""
    text = standard_library()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(0, len(text) - SEQUENCE, (batch_size,), generator=generator)
        tokens = torch.stack([text[start : start + SEQUENCE] for start in starts.tolist()]).long()
        yield {"input_ids": tokens, "labels": tokens}


class WindowsOfText(Dataset[dict[str, torch.Tensor]]):
    """Neighbouring windows of the text, as a dataset; labels are the inputs, as Hugging Face's models expect."""

    def __init__(self, windows: int = 4096, length: int = 32) -> None:
        text = standard_library(length * windows)
        self._tokens = text[: len(text) // length * length].view(-1, length).long()

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def gpt(layers: int = 4, width: int = 128) -> Workload:
    """GPT-2's architecture over bytes, random weights; labels are the inputs, as Hugging Face expects."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=SEQUENCE,
        n_embd=width,
        n_layer=layers,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    tokens = torch.zeros(4, SEQUENCE, dtype=torch.long)
    return Workload(GPT2LMHeadModel(config), {"input_ids": tokens, "labels": tokens}, name="gpt2-bytes")
