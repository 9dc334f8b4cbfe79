"""What people read: the plan's table, the diff, the graph; golden texts in tests/golden."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cost_models.cluster import ClusterSpec
from cost_models.precision import Precision
from cost_models.shown import printable
from cost_models.units import counted, percent
from partitioner.pictures.dot import to_dot
from partitioner.pictures.drawing import drawing_json
from partitioner.pictures.plan_drawing import stage_drawing
from partitioner.plan import Plan
from partitioner.report.sharding import communication_share
from partitioner.report.table import microbatch_text
from partitioner.report.text import WIDTH, columns, labelled, text_within, wrapped
from tests.support.made_plans import GIB, made_hybrid_plan, made_plan, made_sharded_plan

pytestmark = pytest.mark.usefixtures("fixed_spreads")
Golden = Callable[[str, str], None]
CLUSTERS = Path(__file__).parents[4] / "docs" / "clusters"


def gpus(count: int) -> ClusterSpec:
    return ClusterSpec.parse(f"A100-40GB:{count}")


def test_a_plan_on_two_equal_devices(golden: Golden) -> None:
    golden("plan_two_devices", str(made_plan(ClusterSpec.preset("dgx-h100"))))


def test_a_plan_of_many_stages_on_several_nodes_shows_the_first_and_last(golden: Golden) -> None:
    cluster = ClusterSpec.preset("dgx-a100", nodes=3)
    golden("plan_many_stages", str(made_plan(cluster, tuple(range(24)), peak_bytes=70 * GIB)))


def test_chunks_of_one_device_show_its_memory_once(golden: Golden) -> None:
    plan = made_plan(gpus(2), (0, 1, 0, 1), schedule="interleaved", blocks_per_stage=1)
    golden("plan_interleaved", str(plan))


def test_a_plan_without_messages_notes_or_alternatives(golden: Golden) -> None:
    plan = made_plan(
        gpus(1),
        (0,),
        batch_size=1,
        microbatches=1,
        alternatives=(),
        not_considered=(),
        notes=(),
        attention_backend=None,
    )
    golden("plan_one_device", str(plan))


def test_a_sharded_plan_on_many_nodes(golden: Golden) -> None:
    plan = made_sharded_plan(ClusterSpec.preset("dgx-h100", nodes=8), {"outer": 8, "inner": 8})
    Plan.from_json(plan.model_dump_json())
    golden("plan_sharded_64", str(plan))


def test_a_sharded_plan_on_one_axis(golden: Golden) -> None:
    plan = made_sharded_plan(gpus(4), {"all": 4}, microbatches=1)
    Plan.from_json(plan.model_dump_json())
    golden("plan_sharded_4", str(plan))


def test_a_plan_of_several_sharded_stages(golden: Golden) -> None:
    """Every stage's mesh, layouts and collectives; communication is that of the devices that communicate longest."""
    plan = made_hybrid_plan(gpus(7), ({"outer": 2, "inner": 2}, {"all": 2}, {}), crossing=True)
    Plan.from_json(plan.model_dump_json())
    golden("plan_hybrid", str(plan))
    alone = plan.model_copy(update={"stages": plan.stages[:1]})
    assert communication_share(plan) == communication_share(alone) > 0
    chunks = plan.model_copy(update={"stages": (plan.stages[0], plan.stages[0])})
    assert communication_share(chunks) == 2 * communication_share(alone)


def test_devices_that_differ_are_said_to_wait_for_the_slowest() -> None:
    text = str(
        made_sharded_plan(ClusterSpec.load(CLUSTERS / "two-unlike-nodes.yaml"), {"outer": 2, "inner": 3})
    )
    assert "pace        all devices have equal parts, so the slowest of" in text


def test_a_diff_of_shardings_names_mesh_and_layouts() -> None:
    old = made_sharded_plan(gpus(4), {"outer": 2, "inner": 2})
    new = made_sharded_plan(gpus(4), {"all": 4})
    lines = old.diff(new).splitlines()
    assert "mesh: outer 2 × inner 2 -> 4" in lines
    assert "inputs: ids S0 R, labels S0 R -> whole" in lines
    assert "stored otherwise: 8 parameters (h.0.up.weight: R S0 -> S0 …)" in lines
    assert (
        "gradients and optimizer state otherwise: 4 parameters (h.0.up.weight: S1 S0 -> not listed …)"
        in lines
    )
    assert "run otherwise: 8 ops (op0: S0 R~ -> S0; R~ S0 -> S2 -> R~ S0 -> S2 …)" in lines
    assert old.diff(old) == ""
    assert "strategy: layer -> feature" in made_plan(gpus(4)).diff(new)


def test_a_diff_of_several_sharded_stages_looks_at_all_of_them() -> None:
    old = made_hybrid_plan(gpus(6), ({"all": 4}, {"outer": 1, "inner": 2}))
    new = made_hybrid_plan(gpus(6), ({"all": 4}, {"all": 2}))
    lines = old.diff(new).splitlines()
    assert "mesh: stage 0: 4; stage 1: outer 1 × inner 2 -> stage 0: 4; stage 1: 2" in lines
    assert "inputs: stage 1: ids S0 R, labels S0 R -> whole" in lines
    assert "stored otherwise: 4 parameters (h.2.up.weight: R S0 -> S0 …)" in lines
    assert old.diff(old) == ""


def test_the_data_type_of_a_model_is_told_where_no_other_line_does() -> None:
    plan = made_plan(ClusterSpec.local(2), (0, 1))
    single = plan.model_copy(update={"model": plan.model.model_copy(update={"dtype": "float32"})})
    assert str(single).splitlines()[0] == "model       chain, 1,234,567,890 parameters in float32"
    assert "precision" not in str(single)
    mixed = single.model_copy(update={"precision": Precision(compute=torch.bfloat16)})
    assert str(mixed).splitlines()[0] == "model       chain, 1,234,567,890 parameters"


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_no_line_is_wider_than_asked_for(width: int) -> None:
    plans = [
        made_plan(ClusterSpec.preset("dgx-v100", nodes=2), ranks, blocks_per_stage=12)
        for ranks in ((0, 1), tuple(range(16)), (0, 1, 0, 1))
    ]
    plans.append(made_sharded_plan(ClusterSpec.preset("dgx-v100", nodes=2), {"outer": 2, "inner": 8}))
    plans.append(made_hybrid_plan(gpus(7), ({"outer": 2, "inner": 2}, {"all": 2}, {}), crossing=True))
    for plan in plans:
        with text_within(width):
            assert max(map(len, str(plan).splitlines())) <= width
        assert max(map(len, str(plan).splitlines())) <= WIDTH == 80


def test_a_wide_terminal_shows_modules_beside_their_stages(golden: Golden) -> None:
    with text_within(120):
        golden("plan_wide", str(made_plan(ClusterSpec.preset("dgx-a100", nodes=3), tuple(range(24)))))


def test_a_narrow_terminal_cuts_tables_in_two(golden: Golden) -> None:
    with text_within(60):
        golden("plan_narrow", str(made_hybrid_plan(gpus(6), ({"outer": 2, "inner": 2}, {"all": 2}))))


def test_words_of_a_table_are_wrapped_and_its_numbers_are_not() -> None:
    rows = [
        ["one device", "3333 s", "does not fit: 714 GiB short"],
        ["a.very.long_name.of.a.module", "1 s", ""],
    ]
    with text_within(52):
        assert columns(("compared with", "step time", "why"), rows, left=("compared with", "why")) == (
            "                          step\n"
            "compared with             time  why\n"
            "one device              3333 s  does not fit: 714\n"
            "                                  GiB short\n"
            "a.very.long_name.of.       1 s\n"
            "  a.module"
        )


def test_a_line_stands_under_each_row() -> None:
    assert columns(("a", "b"), [["1", "2"]], under=("names", "of one")) == "a  b\n   names\n1  2\n   of one"


@pytest.mark.parametrize("name", ["x" * 100, "a_" * 50, "a.b" * 40, "a b " * 30])
def test_a_cell_keeps_within_its_width(name: str) -> None:
    lines = wrapped(name, 20)
    assert max(map(len, lines)) <= 20
    assert "".join("".join(lines).split()) == "".join(name.split())


def test_long_module_names_are_cut_not_wrapped() -> None:
    plan = made_plan(gpus(2))
    stage = plan.stages[0].model_copy(update={"modules": (f"{'a_very_long_name.' * 9}block",)})
    text = str(plan.model_copy(update={"stages": (stage, plan.stages[1])}))
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" in text


def test_escape_sequences_of_a_hostile_plan_do_not_reach_the_terminal() -> None:
    plan = made_plan(gpus(2))
    hostile = plan.model_copy(update={"model": plan.model.model_copy(update={"name": "\x1b[31m[/red]"})})
    assert "\x1b" not in str(hostile)
    assert "?[31m[/red]" in str(hostile)


def test_a_diff_names_what_changed_and_by_how_much(golden: Golden) -> None:
    old = made_plan(gpus(2))
    new = made_plan(
        gpus(4),
        (0, 1, 2),
        schedule="zb-h1",
        prediction=made_plan(gpus(4), (0, 1, 2)).prediction.model_copy(update={"step_seconds": 0.2}),
    )
    golden("diff", old.diff(new))
    assert old.diff(old) == ""


def test_the_stages_of_a_plan_as_dot(golden: Golden) -> None:
    drawing = stage_drawing(made_plan(gpus(2)))
    golden("stages_dot", to_dot(drawing))
    sent = [bridge["size_bytes"] for edge in drawing_json(drawing)["edges"] for bridge in edge["bridges"]]
    assert sent == [16 << 20]


def test_a_plan_that_leaves_devices_idle_says_what_to_try() -> None:
    assert "strategy auto, which shares layers out as well: this plan leaves 2 devices idle" in " ".join(
        str(made_plan(gpus(4), (0, 1))).split()
    )
    assert "strategy auto" not in str(made_plan(gpus(2), (0, 1)))


def test_launch_commands_name_every_node() -> None:
    plan = made_plan(ClusterSpec.preset("dgx-h100", nodes=2), tuple(range(16)))
    lines = plan.launch_command("gpt2", "my plan.json", 5).splitlines()
    assert [line.split("--node-rank ")[1][0] for line in lines[1::2]] == ["0", "1"]
    assert "--nproc-per-node 8" in lines[1]
    assert lines[1].endswith("-m partitioner run 'my plan.json' gpt2 --steps 5")


def test_launch_commands_start_no_process_for_idle_devices() -> None:
    plan = made_plan(gpus(4), (0, 2, 3))
    assert plan.used_devices == (0, 2, 3)
    assert plan.world_size == 3
    assert plan.launch_command("gpt2").startswith(
        "CUDA_VISIBLE_DEVICES=0,2,3 torchrun --standalone --nproc-per-node 3 -m partitioner run"
    )
    assert made_plan(gpus(4), (0, 1)).launch_command().startswith("torchrun --standalone --nproc-per-node 2")
    unlike = ClusterSpec.load(CLUSTERS / "two-unlike-nodes.yaml")
    lines = made_plan(unlike, (1, 3, 4)).launch_command("gpt2").splitlines()
    assert [line.partition(" -m ")[0] for line in lines] == [
        "# on server",
        "CUDA_VISIBLE_DEVICES=1,3 torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2 "
        "--master-addr 192.168.1.10 --master-port 29500",
        "# on workstation",
        "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 1 --master-addr 192.168.1.10 --master-port 29500",
    ]
    sharded = made_sharded_plan(ClusterSpec.preset("dgx-h100", nodes=2), {"outer": 2, "inner": 8})
    assert [line.count("--nproc-per-node 8") for line in sharded.launch_command().splitlines()[1::2]] == [
        1,
        1,
    ]
    alone = made_plan(unlike, (4, 5)).launch_command("gpt2")
    assert alone.startswith("torchrun --standalone --nproc-per-node 2 -m partitioner run")


def test_two_entries_of_one_host_are_one_command() -> None:
    """Two unlike cards in one machine: a process each, on a card each, whichever entry they are in."""
    card = {"memory": "11GiB", "memory_bandwidth": "360GB/s", "flops": {"float32": "12T"}}

    def desk(*hosts: str) -> ClusterSpec:
        nodes = [
            {"name": f"n{number}", "host": host, "device": {"name": f"card {number}", **card}}
            for number, host in enumerate(hosts)
        ]
        return ClusterSpec.from_dict({"nodes": nodes, "network": "Ethernet-25G"})

    both = made_plan(desk("10.0.0.2", "10.0.0.2"), (0, 1)).launch_command("gpt2")
    assert both.startswith("torchrun --standalone --nproc-per-node 2 -m partitioner run")
    second = made_plan(desk("desk", "desk"), (1,)).launch_command("gpt2")
    assert second.startswith("CUDA_VISIBLE_DEVICES=1 torchrun --standalone --nproc-per-node 1 -m")
    lines = made_plan(desk("desk", "far", "Desk"), (0, 1, 2)).launch_command("gpt2").splitlines()
    assert [line.partition(" --master-addr")[0] for line in lines] == [
        "# on n0 and n2",
        "torchrun --nnodes 2 --node-rank 0 --nproc-per-node 2",
        "# on n1",
        "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 1",
    ]


def test_micro_batches_in_words() -> None:
    assert microbatch_text(8, 2) == "2 micro-batches of 4"
    assert microbatch_text(9, 2) == "1 micro-batch of 5 + 1 of 4"
    assert microbatch_text(1, 1) == "1 micro-batch of 1"


def test_words() -> None:
    assert counted(1, "process") == "1 process"
    assert counted(2, "process") == "2 processes"
    assert counted(2000, "micro-batch") == "2,000 micro-batches"
    assert [percent(p) for p in (0, 0.00042, 0.123, 1.5)] == ["0%", "0.04%", "12.3%", "150.0%"]
    assert printable("a\tb\x07\nc") == "a?b?\nc"
    assert columns(["a", "b"], [["x", "1"], ["yy", "22"]], left=("a",)) == "a    b\nx    1\nyy  22"
    assert labelled("note", "word " * 40).splitlines()[1].startswith(" " * 12 + "word")
