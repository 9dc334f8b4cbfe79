"""Bytes of tensors alive."""

from __future__ import annotations

import torch

from tests.support.alive import AliveBytes


def test_counts_storages_once_and_frees_them() -> None:
    known = torch.zeros(10)
    with AliveBytes([known]) as alive:
        assert alive.current_bytes == 40
        a = torch.zeros(100)
        view = a[10:20].view(2, 5)
        assert alive.current_bytes == 440
        del a
        assert alive.current_bytes == 440  # the view keeps it
        del view
        assert alive.current_bytes == 40
        torch.ones(50) + torch.ones(50)  # three of 200 bytes at once
    assert alive.current_bytes == 40
    assert alive.peak_bytes == 640


def test_sees_what_autograd_saves_and_the_backward_makes() -> None:
    x = torch.ones(25, requires_grad=True)
    with AliveBytes([x]) as alive:
        y = x.exp()  # 100 bytes, kept for the backward
        loss = y.sum()  # 4 bytes
        del y
        assert alive.current_bytes == 100 + 100 + 4
        loss.backward()
        assert x.grad is not None
        del loss
        assert alive.current_bytes == 200  # x and its gradient


def test_an_ignored_batch_never_counts_nor_do_its_views() -> None:
    batch = torch.zeros(100)
    with AliveBytes(ignored=[batch]) as alive:
        piece = batch[:50]
        assert alive.current_bytes == 0
        copy = piece.clone()
        assert alive.current_bytes == copy.numel() * 4
