"""Stages in the user's words."""

from __future__ import annotations

from partitioner.record.modules import common_parent, compress, modules_of_stages, shorten


def stages(*contents: list[str]) -> list[tuple[str, ...]]:
    """Modules named for stages that hold one op per path."""
    ops = [(f"op{s}_{i}", path, s) for s, paths in enumerate(contents) for i, path in enumerate(paths)]
    return modules_of_stages({o: p for o, p, _ in ops}, {o: s for o, _, s in ops}, len(contents))


def test_outermost_whole_modules_are_named() -> None:
    found = stages(["embed", "layers.0.fc", "layers.1.fc", "layers.2.up"], ["layers.2.down", ""])
    assert found == [("embed", "layers.0-1", "layers.2.up"), ("layers.2.down",)]


def test_a_block_split_into_many_pieces_is_named_once() -> None:
    found = stages(
        ["h.0.attn", "h.0.mlp", "h.1.ln_1", "h.1.attn", "h.1.ln_2"],
        ["h.1.mlp.up", "h.1.mlp.down", "h.2.attn"],
    )
    assert found == [("h.0", "h.1 (part)"), ("h.1.mlp", "h.2")]


def test_a_split_leaf_module_is_marked() -> None:
    assert stages(["fc"], ["fc"]) == [("fc (part)",), ("fc (part)",)]


def test_glue_of_a_container_is_named_only_where_nothing_else_is() -> None:
    assert stages(["model", "model.a"], ["model.b", "model"]) == [("model.a",), ("model.b",)]
    assert stages(["model", "model"], ["model.a", "model.b"])[0] == ("model (part)",)


def test_ops_of_the_root_need_no_name() -> None:
    assert stages([""], ["fc"]) == [(), ("fc",)]


def test_runs_are_compressed() -> None:
    assert compress(["x", "h.0", "h.1", "h.2", "h.4", "g.5"]) == ["x", "h.0-2,4", "g.5"]
    assert compress(["h.1", "norm", "h.0", "h.0"]) == ["h.0-1", "norm"]


def test_long_lists_are_shortened_with_a_count() -> None:
    assert shorten(["alpha", "beta", "gamma"], 18) == "alpha +2 more"
    assert shorten(["alpha", "beta"], 18) == "alpha, beta"
    assert shorten([], 18) == ""


def test_runs_of_blocks_are_kept_when_others_are_dropped() -> None:
    assert shorten(["wte", "wpe", "drop", "h.0-3", "ln_f"], 18) == "wte, h.0-3 +3 more"


def test_blocks_are_folded_where_they_do_not_fit() -> None:
    names = [
        "layers.69.post_attention_layernorm",
        "layers.69.mlp",
        "layers.70",
        "layers.71.self_attn",
        "norm",
    ]
    assert shorten(names, 30) == "layers.69-71 (part), norm"
    assert shorten(["a.0-1", "a.3", "b", "c.0.x.1"], 8) == "a.0-1,3 +2 more"
    assert len(shorten(["a.0-99999999999999999999", "b" * 30], 20)) < 40


def test_a_parent_that_most_names_share_is_found() -> None:
    assert common_parent([("model.a", "model.b"), ("model.c", "head")]) == "model."
    assert common_parent([("encoder.a",), ("decoder.a",)]) == ""
    assert common_parent([("a", "b")]) == ""
