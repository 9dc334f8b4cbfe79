"""Made-up data of report pages, small and large, in the shape that the page reads.

made_report(stages, layers, ops_in_a_layer)    one plan of a language model in a pipeline
hostile_report()                               the same with names that try to become markup
two_reports()                                  two plans side by side
"""

from __future__ import annotations

import copy
from typing import Any

GIB = 1024**3
Data = dict[str, Any]

HOSTILE_NAMES = (
    "<script>window.broken = 1</script>",
    '</script><img src=x onerror="window.broken = 1">',
    "\"'`{{ 7*7 }}${7*7}&amp;\u2028\u2029",
    "שלום \u202eevil\u202c",
    "🚀" * 40 + "👩‍👩‍👧",
    "x" * 10_000,
)
KINDS = [
    ("linear", "aten.linear.default", "8×4096×8192"),
    ("mul", "aten.mul.Tensor", "8×4096×8192"),
    ("attention", "aten.scaled_dot_product_attention.default", "8×64×4096×128"),
    ("add", "aten.add.Tensor", "8×4096×8192"),
]


def made_report(stages: int = 4, layers: int = 8, ops_in_a_layer: int = 12, microbatches: int = 8) -> Data:
    """Make the report of one plan: ``layers`` equal layers in ``stages`` stages of four ranks each."""
    return {"plans": [_plan(stages, layers, ops_in_a_layer, microbatches)], "differences": []}


def two_reports() -> Data:
    """Make a report of two plans that differ in their stages."""
    first, second = made_report(4), made_report(2)
    second["plans"][0]["title"] = "made-up on 2 stages"
    return {
        "plans": first["plans"] + second["plans"],
        "differences": ["4 stages, not 2", "step time 1.20 s, not 1.41 s"],
    }


def hostile_report() -> Data:
    """Make a report whose names are the worst that a model, a file and a user could bring."""
    report = copy.deepcopy(made_report())
    plan = report["plans"][0]
    names = list(HOSTILE_NAMES)
    plan["title"], plan["file"], plan["made_with"] = names[1], names[0], names[4]
    plan["summary"]["facts"][0].update(label=names[0], value=names[2], note=names[3])
    plan["summary"]["sentences"].append({"title": names[0], "text": names})
    plan["summary"]["notes"] = names
    for index, stage in enumerate(plan["stages"]):
        stage.update(name=names[index], devices=names[index], modules=names[index])
    graph = plan["graph"]
    for index, name in enumerate(names):
        graph["ops"][index][0] = name
        graph["sources"].append(name)
        graph["ops"][index][3] = len(graph["sources"]) - 1
        graph["parameters"].append({"name": name, "shape": name, "size_bytes": 4, "layout": name})
        graph["ops"][index][5] = [len(graph["parameters"]) - 1]
        graph["bridges"].append(
            {"from": 0, "to": index, "kind": "send/recv", "size_bytes": 4, "gradient": False, "text": name}
        )
    graph["kinds"][0].update(op=names[0], shape=names[1])
    graph["tree"]["children"][0].update(name=names[1], label=names[3], **{"class": names[0]})
    for index, lane in enumerate(plan["timeline"]["lanes"]):
        lane["label"] = plan["memory"]["lanes"][index]["label"] = plan["traffic"]["labels"][index] = names[
            index
        ]
    plan["timeline"]["waits"]["0:1"] = names[0]
    plan["devices"]["nodes"][0]["name"] = names[0]
    plan["what_if"]["flips"] = names
    return report


def _plan(stages: int, layers: int, ops_in_a_layer: int, microbatches: int) -> Data:
    forward, backward = 0.02, 0.04
    timeline = _timeline(stages, microbatches, forward, backward)
    step = timeline["step_seconds"]
    ranks = [list(range(4 * stage, 4 * stage + 4)) for stage in range(stages)]
    labels = [f"ranks {group[0]}-{group[-1]}" for group in ranks]
    busy = microbatches * (forward + backward)
    return {
        "title": f"made-up on {stages} stages",
        "file": "plan.json",
        "made_with": "partitioner 0.1.0",
        "summary": {
            "facts": [
                {"label": "step time", "value": f"{step:.2f} s", "note": "from datasheet rates"},
                {"label": "throughput", "value": "570,121 tokens/s", "note": "139 samples/s"},
                {"label": "MFU", "value": "47.3 %", "note": ""},
                {"label": "strategy", "value": "hybrid", "note": f"{stages} stages, mesh of 4"},
                {"label": "batch", "value": f"256 in {microbatches} micro-batches", "note": ""},
            ],
            "division": [
                {"kind": "compute", "seconds": 0.7 * busy, "share": 0.7 * busy / step},
                {"kind": "communication", "seconds": 0.3 * busy, "share": 0.3 * busy / step},
                {
                    "kind": "waiting (bubble)",
                    "seconds": step - busy - 0.02,
                    "share": (step - busy - 0.02) / step,
                },
                {"kind": "optimizer", "seconds": 0.02, "share": 0.02 / step},
            ],
            "fullest": {"device": "rank 0", "used_bytes": 61 * GIB, "capacity_bytes": 78 * GIB},
            "sentences": [
                {
                    "title": "Why this plan",
                    "text": ["Four devices share every layer; the stages divide the layers evenly."],
                },
                {
                    "title": "How sure",
                    "text": ["No plan simulates below 1.10 s; this one takes 1.09 times that."],
                },
                {
                    "title": "Proof",
                    "text": [
                        "Everything sent is received, every gradient is summed, nothing waits in a circle."
                    ],
                },
            ],
            "alternatives": [
                {
                    "name": "one device",
                    "step_seconds": 11.1,
                    "peak_bytes": 104 * GIB,
                    "feasible": False,
                    "reason": "25.8 GiB short",
                },
                {
                    "name": "data parallel x16",
                    "step_seconds": step * 1.12,
                    "peak_bytes": 70 * GIB,
                    "feasible": True,
                    "reason": "",
                },
            ],
            "step_seconds": step,
            "notes": ["use_cache was switched off for tracing"],
        },
        "stages": [
            {
                "name": f"stage {stage}",
                "devices": labels[stage],
                "ranks": ranks[stage],
                "modules": f"layers.{stage}",
                "mesh": "tensor 4",
                "forward_seconds": forward,
                "backward_seconds": backward,
                "parameter_bytes": 4 * GIB,
                "in_flight": stages - stage,
            }
            for stage in range(stages)
        ],
        "graph": _graph(stages, layers, ops_in_a_layer),
        "devices": _devices(ranks),
        "timeline": timeline
        | {"lanes": [lane | {"label": labels[i]} for i, lane in enumerate(timeline["lanes"])]},
        "memory": {"lanes": [_memory(label, stage, step) for stage, label in enumerate(labels)]},
        "traffic": {
            "ranks": 4 * stages,
            "labels": labels,
            "pairs": [
                [a, b, (a + b + 1) * 40 * 2**20]
                for a in range(stages)
                for b in range(stages)
                if abs(a - b) <= 1
            ],
            "links": [[f"nvlink node{n}", (n + 1) * GIB, 0.1 * (n + 1)] for n in range(max(1, stages // 2))],
        },
        "what_if": {
            "series": [
                {
                    "title": title,
                    "unit": "×",
                    "points": [
                        {
                            "x": x,
                            "step_seconds": step * (0.8 + 0.2 / x),
                            "fits": title != "Memory" or x >= 1,
                            "text": "",
                        }
                        for x in (0.25, 0.5, 1, 2, 4)
                    ],
                }
                for title in ("Network bandwidth", "Memory", "Batch")
            ],
            "flips": [
                "Below half of the network's bandwidth, data parallelism would be slower than 8 stages."
            ],
        },
    }


def _graph(stages: int, layers: int, ops_in_a_layer: int) -> Data:
    ops: list[list[Any]] = [["embed.embedding", 0, 0, 0, [], [0], 0, -1]]
    parameters = [
        {"name": "embed.weight", "shape": "128256×8192", "size_bytes": GIB, "layout": "whole on every device"}
    ]
    embed = _node("embed", "Embedding", [], [0], first=0, count=1)
    members: list[list[Data]] = [[] for _ in range(stages)]
    bridges: list[Data] = []
    for layer in range(layers):
        stage = layer * stages // layers
        halves: list[Data] = []
        start = len(ops)
        for half, count in (("attn", ops_in_a_layer // 2), ("mlp", ops_in_a_layer - ops_in_a_layer // 2)):
            own: list[int] = []
            entry = len(ops) - 1
            for i in range(count):
                index = len(ops)
                inputs = [index - 1] if i % 4 != 3 else [index - 1, max(entry, index - 3)]
                owned: list[int] = []
                if i % 4 == 0:
                    name = f"layers.{layer}.{half}.proj_{i}.weight"
                    layout = "split along dimension 0 over tensor"
                    parameters.append(
                        {"name": name, "shape": "8192×8192", "size_bytes": 2**27, "layout": layout}
                    )
                    owned = [len(parameters) - 1]
                ops.append(
                    [f"layers.{layer}.{half}.op_{i}", i % 4, stage, 1 + i % 2, inputs, owned, i % 2, -1]
                )
                own.append(index)
            halves.append(_node(f"layers.{layer}.{half}", half.title(), [], own, own[0], count))
            bridges.append(_bridge(own[-1] - 1, own[-1], "all-reduce"))
        members[stage].append(_node(f"layers.{layer}", "DecoderLayer", halves, [], start, ops_in_a_layer))
        if start > 1 and ops[start - 1][2] != stage:
            bridges.append(_bridge(start - 1, start, "send/recv"))
    pieces = [len(ops) + piece for piece in range(4)]
    ops += [
        [f"lm_head.linear#{piece}", 0, piece % stages, 1, [pieces[0] - 1], [], -1, 0] for piece in range(4)
    ]
    folds = [_fold(group) if len(group) > 1 else group[0] for group in members if group]
    body = _node("model", "Model", [embed, *folds], [], 0, pieces[0])
    head = _node("lm_head", "Linear", [], pieces, pieces[0], 4)
    return {
        "kinds": [
            {
                "op": op,
                "target": target,
                "shape": shape,
                "dtype": "bfloat16",
                "forward_flops": 4.4e12,
                "backward_flops": 8.8e12,
                "output_bytes": 2**29,
                "saved_bytes": 2**28,
                "forward_seconds": 1.2e-3,
            }
            for op, target, shape in KINDS
        ],
        "sources": [
            "modeling.py:12  h = self.embed(ids)",
            "modeling.py:30  q = self.proj(h)",
            "modeling.py:31  h = h * q",
        ],
        "parameters": parameters,
        "ops": ops,
        "layouts": ["tensor: split along dimension 2 in and out", "tensor: whole in, parts of a sum out"],
        "tree": _node("", "CausalModel", [body, head], [], 0, len(ops)),
        "bridges": bridges,
    }


def _node(name: str, class_name: str, children: list[Data], ops: list[int], first: int, count: int) -> Data:
    label = name.rsplit(".", 1)[-1] or "model"
    return {
        "name": name,
        "label": label,
        "class": class_name,
        "children": children,
        "ops": ops,
        "first": first,
        "count": count,
        "times": 1,
        "like": "",
    }


def _fold(members: list[Data]) -> Data:
    first, last = members[0], members[-1]
    like = f"{first['name']}–{last['label']}"
    return first | {
        "label": f"{like} ×{len(members)}",
        "times": len(members),
        "like": like,
        "count": sum(member["count"] for member in members),
        "members": members,
    }


def _bridge(source: int, target: int, kind: str) -> Data:
    return {
        "from": source,
        "to": target,
        "kind": kind,
        "size_bytes": 2**27,
        "gradient": False,
        "text": "over NVLink",
    }


def _devices(ranks: list[list[int]]) -> Data:
    nodes = []
    for number in range(0, len(ranks), 2):
        devices = [
            {
                "rank": rank,
                "model": "H100-80GB",
                "memory_bytes": 78 * GIB,
                "peak_bytes": (61 - 2 * stage) * GIB,
                "stages": [stage],
            }
            for stage in range(number, min(number + 2, len(ranks)))
            for rank in ranks[stage]
        ]
        nodes.append({"name": f"node{number // 2}", "devices": devices})
    links = []
    for number, node in enumerate(nodes):
        links.append(
            _link(f"nvlink {node['name']}", node["name"], node["name"], 450e9, (number + 1) * 40 * GIB, 0.2)
        )
        links.append(
            _link(
                f"network {node['name']}",
                node["name"],
                "network",
                400e9,
                (number + 1) * GIB,
                0.6 * (number == 0),
            )
        )
    return {"nodes": nodes, "links": links}


def _link(name: str, a: str, b: str, bandwidth: float, sent_bytes: int, busy: float) -> Data:
    return {
        "name": name,
        "a": a,
        "b": b,
        "bandwidth": bandwidth,
        "latency_seconds": 2e-6,
        "sent_bytes": sent_bytes,
        "busy": busy,
    }


def _timeline(stages: int, microbatches: int, forward: float, backward: float) -> Data:
    """Make a step of GPipe: all forwards, then all backwards, then the sums and the optimizer."""
    lanes = []
    waits: dict[str, str] = {}
    turn = (microbatches + stages - 1) * forward
    end = turn + (microbatches + stages - 1) * backward
    transfers = []
    for stage in range(stages):
        spans: list[list[Any]] = []
        for batch in range(microbatches):
            start = (batch + stage) * forward
            spans.append([start, start + forward, "F", stage, batch])
            if stage:
                waits[f"{stage}:{batch}"] = f"waits for F{batch} of stage {stage - 1}"
                transfers.append([start - 0.002, start, stage - 1, stage, "h", 2**27, False, batch])
        for batch in range(microbatches):
            start = turn + (batch + stages - 1 - stage) * backward
            spans.append([start, start + backward, "B", stage, batch])
        spans.append([end, end + 0.01, "R", -1, -1])
        spans.append([end + 0.01, end + 0.03, "O", -1, -1])
        lanes.append({"label": "", "ranks": [], "stages": [stage], "spans": spans, "text": {}})
    return {
        "step_seconds": end + 0.03,
        "lanes": lanes,
        "transfers": transfers,
        "inside": [
            {
                "stage": stage,
                "kind": "all-reduce",
                "axis": "tensor",
                "count": 2,
                "seconds": 0.01 if is_backward else 0.005,
                "backward": is_backward,
                "size_bytes": 2**27,
            }
            for stage in range(stages)
            for is_backward in (False, True)
        ],
        "critical": [[0, batch] for batch in range(microbatches)],
        "waits": waits,
        "measured": None,
    }


def _memory(label: str, stage: int, step: float) -> Data:
    times = [step * i / 40 for i in range(41)]
    held = [min(i, 40 - i) for i in range(41)]
    sizes = [12, 24, 12, 1, 0, 2, 0]
    stacks = [[size * GIB // 2] * 41 for size in sizes]
    stacks[4] = [count * (40 - stage) * GIB // 25 for count in held]
    stacks[6] = [(i % 3) * GIB for i in range(41)]
    totals = [sum(stack[i] for stack in stacks) for i in range(41)]
    peak = max(range(41), key=lambda i: totals[i])
    return {
        "label": label,
        "capacity_bytes": 78 * GIB,
        "kinds": [
            "parameters",
            "gradients",
            "optimizer",
            "batch",
            "activations",
            "values and buffers",
            "transients",
        ],
        "seconds": times,
        "stacks": stacks,
        "peak_bytes": totals[peak],
        "peak_at": times[peak],
        "peak_text": "The peak is held mostly by activations of 8 micro-batches.",
    }
