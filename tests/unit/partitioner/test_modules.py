from __future__ import annotations

from partitioner.modules import compress, modules_of_stages, shorten


def test_outermost_whole_modules_are_named() -> None:
    paths = {"a": "embed", "b": "layers.0.fc", "c": "layers.1.fc", "d": "layers.2.up", "e": "layers.2.down", "f": ""}
    stage_of = {"a": 0, "b": 0, "c": 0, "d": 0, "e": 1, "f": 1}
    assert modules_of_stages(paths, stage_of, 2) == [("embed", "layers.0-1", "layers.2.up"), ("layers.2.down",)]


def test_a_split_leaf_module_is_marked() -> None:
    assert modules_of_stages({"a": "fc", "b": "fc"}, {"a": 0, "b": 1}, 2) == [("fc (part)",), ("fc (part)",)]


def test_runs_are_compressed() -> None:
    assert compress(["x", "h.0", "h.1", "h.2", "h.4", "g.5"]) == ["x", "h.0-2", "h.4", "g.5"]


def test_long_lists_are_shortened_with_a_count() -> None:
    assert shorten(["alpha", "beta", "gamma"], 18) == "alpha +2 more"
    assert shorten(["alpha", "beta"], 18) == "alpha, beta"
