"""The optimizers that are made by name take every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from partitioner.engine.optimizer import MAKE, make_optimizer


@pytest.mark.parametrize("name", MAKE)
def test_sparse_gradients_train_as_dense_ones(name: str) -> None:
    torch.manual_seed(0)
    dense = nn.Embedding(6, 3)
    sparse = nn.Embedding(6, 3, sparse=True)
    sparse.load_state_dict(dense.state_dict())
    for table in (dense, sparse):
        optimizer = make_optimizer(name, table.parameters(), 0.1)
        assert optimizer is not None
        for picked in (torch.tensor([1, 4, 4]), torch.tensor([0, 4])):
            optimizer.zero_grad()
            table(picked).square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(sparse.weight, dense.weight, rtol=0.0, atol=1e-7)
