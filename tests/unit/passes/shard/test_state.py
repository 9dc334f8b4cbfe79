"""Which gradients are summed together, and in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

from passes.shard.state import ALONE_BYTES, BUCKET_BYTES, FIRST_BUCKET_BYTES, _buckets


def graph_reading(sizes: dict[str, int], read: str) -> Any:
    """Parameters of ``sizes`` in bytes, each read by one op, in the order of ``read``; with one op that is in no sum."""
    graph = fx.Graph()
    nodes = {name: graph.placeholder(f"p_{name}") for name in sizes}
    ops = [graph.call_function(torch.relu, (nodes[name],)) for name in read]
    inputs = [SimpleNamespace(kind="parameter", node=f"p_{name}", name=name) for name in sizes]
    parameters = {name: SimpleNamespace(size_bytes=size) for name, size in sizes.items()}
    return SimpleNamespace(parameters=parameters, inputs=inputs, ops=ops)


def buckets(sizes: dict[str, int], read: str) -> list[str]:
    return ["".join(bucket) for bucket in _buckets(graph_reading(sizes, read), tuple(sizes))]


def test_what_is_read_last_is_summed_first() -> None:
    assert buckets(dict.fromkeys("abcd", 8), "cabd") == ["dbac"]
    assert buckets(dict.fromkeys("abc", 8), "abcb") == ["cba"]  # b's gradient waits for its first reader


def test_large_gradients_go_alone_and_small_ones_wait_for_each_other() -> None:
    sizes = {"a": 8, "b": ALONE_BYTES, "c": 8, "d": ALONE_BYTES + 8, "e": FIRST_BUCKET_BYTES}
    assert buckets(sizes, "abcde") == ["d", "b", "eca"]


def test_without_large_ones_the_first_bucket_is_small() -> None:
    sizes = {"a": FIRST_BUCKET_BYTES, "b": FIRST_BUCKET_BYTES, "c": FIRST_BUCKET_BYTES // 2}
    assert buckets(sizes, "abc") == ["c", "ba"]


def test_buckets_are_bounded() -> None:
    names = "abcdefghijklmnopqrstuvwxyz"
    sizes = dict.fromkeys(names, ALONE_BYTES - 1)
    found = [bucket for bucket in buckets(sizes, names) if len(bucket) > 1]
    assert all(sum(sizes[name] for name in bucket) <= BUCKET_BYTES for bucket in found)
    assert sum(map(len, buckets(sizes, names))) == len(names)
