"""Sequence to sequence with stacked LSTMs, unrolled over time (Sutskever, Vinyals and Le 2014).

    partitioner plan examples/lstm_seq2seq.py:lstm_seq2seq --cluster local:3 --batch-size 64

This is the model of the well-known TensorFlow figure that puts each of three layers on a device of its own.
Cells are unrolled, so the graph is a grid of layers × time steps: layer by layer, step t of layer 1 runs
beside step t−1 of layer 2, a wavefront.

Shapes: source (source_steps, batch) and target (target_steps + 1, batch) token ids, time first: the batch is
dimension 1.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from partitioner.models.workload import Workload

State: TypeAlias = tuple[Tensor, Tensor]
"""Hidden and cell state, (batch, hidden) each."""


class LSTMCell(nn.Module):
    """One LSTM step, written out.

    i, f, g, o = W·x + U·h + b;   c' = σ(f)·c + σ(i)·tanh(g);   h' = σ(o)·tanh(c')
    """

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.of_input = nn.Linear(inputs, 4 * hidden)
        self.of_hidden = nn.Linear(hidden, 4 * hidden, bias=False)

    def forward(self, x: Tensor, state: State) -> State:
        hidden, cell = state
        i, f, g, o = (self.of_input(x) + self.of_hidden(hidden)).chunk(4, dim=-1)
        cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
        return torch.sigmoid(o) * torch.tanh(cell), cell


class Stack(nn.Module):
    """``layers`` cells on top of each other."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        self.cells = nn.ModuleList(LSTMCell(hidden, hidden) for _ in range(layers))

    def forward(self, x: Tensor, states: list[State]) -> tuple[Tensor, list[State]]:
        following = []
        for cell, state in zip(self.cells, states, strict=True):
            x, memory = cell(x, state)
            following.append((x, memory))
        return x, following


class Seq2Seq(nn.Module):
    """Reads ``source``, predicts each token of ``target`` from those before it, returns the mean loss."""

    def __init__(self, vocabulary: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.layers = layers
        self.source_embedding = nn.Embedding(vocabulary, hidden)
        self.target_embedding = nn.Embedding(vocabulary, hidden)
        self.encoder = Stack(hidden, layers)
        self.decoder = Stack(hidden, layers)
        self.project = nn.Linear(hidden, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        words = self.source_embedding(source)
        zero = words.new_zeros(source.shape[1], self.hidden)
        states: list[State] = [(zero, zero) for _ in range(self.layers)]
        for step in range(source.shape[0]):
            _, states = self.encoder(words[step], states)
        given = self.target_embedding(target[:-1])
        logits = []
        for step in range(target.shape[0] - 1):
            top, states = self.decoder(given[step], states)
            logits.append(self.project(top))
        return F.cross_entropy(torch.stack(logits).flatten(0, 1), target[1:].flatten())


def lstm_seq2seq(
    vocabulary: int = 8000,
    hidden: int = 512,
    layers: int = 3,
    source_steps: int = 10,
    target_steps: int = 10,
    batch: int = 4,
    seed: int = 0,
) -> Workload:
    """``layers`` LSTM layers in the encoder and as many in the decoder."""
    torch.manual_seed(seed)
    model = Seq2Seq(vocabulary, hidden, layers)
    example = {
        "source": torch.randint(vocabulary, (source_steps, batch)),
        "target": torch.randint(vocabulary, (target_steps + 1, batch)),
    }
    return Workload(model, example, name="lstm_seq2seq")
