"""Planted faults, as data: one wrong line each. ``benchmarks.faults`` puts them into a copy of the checkout, one by one.

A fault whose old text does not stand in its file exactly once is an error: the table goes on with the code.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """One line that is wrong. ``plans``: those of ``fault_plans`` that reach it."""

    area: str
    wrong: str
    """What it does wrong, in a few words."""
    file: str
    old: str
    new: str
    plans: tuple[str, ...]
    test: str
    """Arguments of pytest, with "|" between them: the smallest tests that should see it."""
    needs_train: bool = False
    """True if only the engine's own way goes there: ``verify --train``."""


def _rules(family: str) -> str:
    return f"tests/unit/passes/shard/rules/test_rules.py|-k|whole_op_gives and {family}"


_LOCAL = "tests/distributed/test_local_ops.py|" + _rules("loss or classes_and_samples")
_BRIDGES = "tests/distributed/test_bridges.py|-k|equals_one_process or fused"
_SHARDED = "tests/distributed/test_sharded.py::test_equals_one_process"
_CHECK = "tests/unit/runtime/program/test_order.py"
_SEGMENTS = "tests/unit/passes/lower/test_segment.py"
_LOWER = "tests/unit/passes/lower|tests/distributed/test_engine.py|-k|lower or course"
_COURSE = "tests/distributed/test_engine.py|-k|course"
_SPLIT = "tests/unit/passes/split"
_CHECKPOINTS = "tests/distributed/test_engine_sharded.py|-k|checkpoints_go_on"
_CHECKPOINT = "tests/distributed/test_checkpoint.py|-k|same_plan"

_RULE = "passes/shard/rules"
_OPS = "runtime/ops"
_RUN = "runtime/execute"

FAULTS: tuple[Fault, ...] = (
    # Rules of sharding
    Fault("rule", "a bias is added on every rank", f"{_RULE}/contractions.py",
          "weight'[o i] bias+[o] -> [b* o]\"", "weight'[o i] bias[o] -> [b* o]\"", ("column_row",), _rules("linear")),
    Fault("rule", "causal queries are cut along the sequence", f"{_RULE}/attention.py",
          'row = "." if argument(node, "is_causal") else "l"', 'row = "l"', ("positions",), _rules("attention")),
    Fault("rule", "statistics of a layer norm over a part", f"{_RULE}/normalize.py",
          '''whole = " ".join("." * len(argument(node, "normalized_shape")))''', '''whole = "n"''',
          ("width",), _rules("norm")),
    Fault("rule", "statistics of a batch norm are a rank's own", f"{_RULE}/normalize.py",
          'local={"b": SAMPLES} if training else {}', "local={}", ("samples",), _rules("norm")),
    Fault("rule", "channels are cut through groups", f"{_RULE}/normalize.py",
          'divides={"c": int(plain(argument(node, "num_groups")))}', "divides={}", ("channels",), _rules("norm")),
    Fault("rule", "a mean over samples is a sum of means", f"{_RULE}/losses.py",
          "local = dict.fromkeys(letters, MEAN) if reduction == AVERAGE else {}\n    return from_terms(node, terms",
          "local = {}\n    return from_terms(node, terms", ("mean",), _rules("loss")),
    # Ops on shards
    Fault("loss weight", "a mean over ranks is not divided by them", f"{_OPS}/local.py",
          'return op(*args, **kwargs) / axes["terms"].size', "return op(*args, **kwargs)", ("mean",), _rules("loss")),
    Fault("loss weight", "valid samples of one rank only", f"{_OPS}/cross_entropy.py",
          'return axes["samples"].all_reduce(total) if "samples" in axes else total', "return total",
          ("weighed_mean",), _LOCAL),
    Fault("offset", "every rank has the first classes", f"{_OPS}/cross_entropy.py",
          "first = classes.rank * here", "first = 0 * here", ("vocabulary",), _LOCAL),
    Fault("rule", "logits of other ranks' targets count", f"{_OPS}/cross_entropy.py",
          "z.gather(dim, index).squeeze(dim).masked_fill(~mine, 0)", "z.gather(dim, index).squeeze(dim)",
          ("vocabulary",), _LOCAL),
    Fault("reduction", "ranks subtract their own largest logit", f"{_OPS}/cross_entropy.py",
          'largest = classes.all_reduce(z.amax(dim), "max")', "largest = z.amax(dim)", ("vocabulary",), _LOCAL),
    Fault("rule", "a gradient for targets of other ranks", f"{_OPS}/cross_entropy.py",
          "-scale.masked_fill(~mine.unsqueeze(dim), 0)", "-scale", ("vocabulary",), _LOCAL),
    Fault("offset", "every rank has the first rows of a table", f"{_OPS}/local.py",
          'first = axes["vocabulary"].rank * weight.shape[0]', "first = 0 * weight.shape[0]",
          ("vocabulary",), _rules("embedding")),
    Fault("rule", "rows of other ranks are not zero", f"{_OPS}/local.py",
          "return found.masked_fill(elsewhere.unsqueeze(-1), 0)", "return found", ("vocabulary",), _rules("embedding")),
    Fault("norm", "variance between ranks is left out", f"{_OPS}/batch_norm.py",
          "variance = (variances + (means - mean) ** 2).mean(0)", "variance = variances.mean(0)",
          ("samples",), "tests/distributed/test_local_ops.py"),
    Fault("norm", "backward divides by one rank's samples", f"{_OPS}/batch_norm.py",
          "ctx.samples.all_reduce(own) / _values_per_channel(x, ctx.samples)",
          "ctx.samples.all_reduce(own) / (_values_per_channel(x, ctx.samples) // ctx.samples.size)",
          ("samples",), "tests/distributed/test_local_ops.py"),
    Fault("norm", "running variance is biased", f"{_OPS}/batch_norm.py",
          "unbiased = variance * (count / (count - 1))", "unbiased = variance", ("samples",), _rules("norm")),
    # Bridges
    Fault("reduction", "a gradient's parts are not summed", f"{_OPS}/bridges.py",
          'linears_behind("sum_gradient", None, given(axis.start_sum, reuse=True))',
          'linears_behind("sum_gradient", None, lambda x: lambda: x)', ("column_row",), _BRIDGES),
    Fault("reduction", "gathered parameters' gradients are not summed", f"{_OPS}/bridges.py",
          "axis.sum_part if partial else axis.part", "axis.part", ("zero3",), _BRIDGES),
    Fault("reduction", "parts of a sum are not summed", f"{_OPS}/bridges.py",
          "return total, axis.sum if partial else None", "return None, axis.sum if partial else None",
          ("column_row",), _BRIDGES),
    Fault("offset", "every rank keeps the first part", "runtime/mesh/axis.py",
          "return _chunks(x, dim, self)[self.index].contiguous()", "return _chunks(x, dim, self)[0].contiguous()",
          ("sequence",), _BRIDGES),
    Fault("order", "gathered parts are joined in reverse", "runtime/mesh/axis.py",
          "return _joined(parts, dim % (parts.dim() - 1), self.order)",
          "return _joined(parts.flip(0), dim % (parts.dim() - 1), self.order)", ("zero3",), _BRIDGES),
    Fault("reduction", "a sum is a maximum", "runtime/mesh/axis.py",
          "work = dist.all_reduce(total, group=self.group, async_op=True)",
          "work = dist.all_reduce(total, dist.ReduceOp.MAX, group=self.group, async_op=True)",
          ("column_row",), _BRIDGES),
    # Sums of gradients, tied and sharded
    Fault("reduction", "a gradient that ranks share is not summed", "passes/shard/syncs.py",
          "if axes:\n            groups[False,", "if len(axes) > 1:\n            groups[False,",
          ("samples",), f"{_SHARDED}[mlp batch]|-m|"),
    Fault("offset", "sums go to the parameters in reverse", f"{_RUN}/reduce.py",
          "for name, shape, total in zip(names, shapes, sums, strict=True):",
          "for name, shape, total in zip(names, shapes[::-1], sums[::-1], strict=True):",
          ("samples",), f"{_SHARDED}[mlp batch]|-m|"),
    Fault("reduction", "the sum is made in a copy", f"{_RUN}/reduce.py",
          "works.append(all_reduce(flat))", "works.append(all_reduce(flat.clone()))",
          ("samples",), f"{_SHARDED}[mlp batch]|-m|"),
    Fault("tied", "a tied parameter's gradient is not summed", "passes/lower/summarize.py",
          "if len(holders[name]) > 1:", "if len(holders[name]) > 2:", ("stages",), _LOWER),
    Fault("tied", "one rank alone takes part in a sum", "runtime/program/order.py",
          "for leader in own.leaders if len(own.ranks) > 1 else ():",
          "for leader in own.leaders[:1] if len(own.ranks) > 1 else ():", ("stages",), _CHECK),
    Fault("optimizer shard", "a rank trains the first part", "runtime/mesh/sharding.py",
          "leaf = leaf.narrow(dim, place[axis] * size, size)", "leaf = leaf.narrow(dim, 0 * size, size)",
          ("zero1",), f"{_SHARDED}[mlp zero 1]|-m|"),
    Fault("optimizer shard", "every rank stores the first block", "runtime/mesh/sharding.py",
          "self.offsets[dim] + index * size, *self", "self.offsets[dim] + 0 * size, *self", ("zero3",),
          f"{_SHARDED}[mlp zero 3]|-m|"),
    Fault("optimizer shard", "updated parts are put in reverse", "runtime/state/sharded_owners.py",
          "for place, row in enumerate(rows[r] for r in places):",
          "for place, row in enumerate(rows[r] for r in reversed(places)):", ("zero1",), f"{_SHARDED}[mlp zero 1]|-m|"),
    # Programs and their order
    Fault("order", "a value is sent before it is made", "runtime/program/order.py",
          "end[sent], sequence[sent], number, target, mb, source, gradient, position[sent] + 1,",
          "end[sent], sequence[sent], number, target, mb, source, gradient, position[sent] + gradient,",
          ("stages",), _CHECK),
    Fault("order", "a receive comes after its use", "runtime/program/order.py",
          "slot = max(min(in_time, consumer - ahead), lowest[target])",
          "slot = max(consumer + 1, lowest[target])", ("stages",), _CHECK),
    Fault("order", "a message on a queue of its own", "runtime/program/order.py",
          "projection[target].append((slot, Recv(message, queue)))",
          'projection[target].append((slot, Recv(message, queue + "x")))', ("stages",), _SEGMENTS),
    Fault("order", "sums are on a queue of all ranks", "runtime/program/order.py",
          "return _Summing(ranks, leaders, moment, group_queue(ranks))",
          'return _Summing(ranks, leaders, moment, "group:all")', ("stages",), _SEGMENTS),
    Fault("order", "the optimizer steps before the sums", "runtime/program/order.py",
          "tails[leader].append(OptimizerStep())", "tails[leader].insert(0, OptimizerStep())", ("stages",), _CHECK),
    Fault("order", "the last backward is left out", "runtime/schedules/pipelines.py",
          'for j in range(microbatches - warmup, microbatches)]\n    return steps\n\n\ndef interleaved',
          'for j in range(microbatches - warmup, microbatches - 1)]\n    return steps\n\n\ndef interleaved',
          ("stages",), "tests/unit/runtime/schedules/test_tables.py"),
    Fault("order", "a value's gradient is never owed", "passes/lower/summarize.py",
          "name, segmentation.segment_of[name], consumers, int(output_bytes[name]), name in graph.needs_grad",
          "name, segmentation.segment_of[name], consumers, int(output_bytes[name]), False",
          ("stages",), _LOWER),
    # Micro-batches and loss weights
    Fault("micro-batch cut", "the smaller micro-batches are cut first", "runtime/segment/microbatch.py",
          "return list(torch.split(leaf, sizes, dim))", "return list(torch.split(leaf, sizes[::-1], dim))",
          ("uneven",), "tests/unit/runtime/segment/test_microbatch.py"),
    Fault("loss weight", "micro-batches count alike", "passes/trace/loss/reduction.py",
          "return [size / samples for size in sizes]", "return [1 / len(sizes) + 0 * samples for size in sizes]",
          ("uneven_mean",), "tests/distributed/test_loss_reduction.py|-k|equals_the_whole or weighing or verify"),
    Fault("loss weight", "tokens of a micro-batch by its samples twice", "passes/graph/token_counts.py",
          "inverse_share = sum(sizes) / samples_of.double()", "inverse_share = samples_of.double() / sum(sizes)",
          ("stages",), "tests/distributed/test_loss_reduction.py|-k|equals_the_whole"),
    Fault("norm", "a micro-batch reads old running statistics", "runtime/segment/runner.py",
          "self._template[target] = contents", "pass", ("running",), "tests/unit/runtime/segment/test_runner.py"),
    Fault("micro-batch cut", "a micro-batch is read twice", f"{_RUN}/bind.py",
          "batch = [piece[microbatch] for piece in pieces]", "batch = [piece[0] for piece in pieces]",
          ("stages",), "tests/distributed/test_execute.py|-k|equals_the_unpartitioned"),
    # Random numbers
    Fault("random", "shards draw the same random numbers", f"{_OPS}/local.py",
          'mix(int(torch.randint(1 << 62, ())), axes["shards"].rank)', "mix(int(torch.randint(1 << 62, ())), 0)",
          ("dropout",), "tests/distributed/test_sharded.py|-k|random_numbers"),
    Fault("random", "micro-batches draw the same random numbers", f"{_OPS}/random.py",
          "mix(self.seed, step, segment, microbatch)", "mix(self.seed, step, segment, 0)",
          ("dropout",), "tests/distributed/test_verify_random.py|-k|by_themselves"),
    # Recomputation and halved backwards
    Fault("recomputation", "a recomputed block takes its inputs in reverse", "runtime/segment/recompute.py",
          "call = graph.call_function(function, tuple(find(node) for node in inputs))",
          "call = graph.call_function(function, tuple(find(node) for node in inputs[::-1]))",
          ("recompute",), "tests/unit/runtime/segment/test_recompute.py"),
    Fault("recomputation", "a recomputed block gives no gradients back", "runtime/segment/recompute.py",
          "function, *inputs, use_reentrant=False",
          'function, *(i.detach() if hasattr(i, "detach") else i for i in inputs), use_reentrant=False',
          ("recompute",), "tests/unit/runtime/segment/test_recompute.py"),
    Fault("weights", "a weight half overwrites what was summed", "runtime/segment/split_backward.py",
          "        parameter.grad += gradient()", "        parameter.grad = gradient()", ("halves",),
          "tests/unit/runtime/segment/test_split_backward.py"),
    Fault("weights", "a weight half is added twice", "runtime/segment/split_backward.py",
          "weight.grad.addmm_(left, right)", "weight.grad.addmm_(left, right, alpha=2)", ("halves",),
          "tests/unit/runtime/segment/test_split_backward.py"),
    # Split neurons and halos
    Fault("split neurons", "a bias is added by every block", "passes/split/rules.py",
          "return None if isinstance(placement, Partial) and not first else values.whole(given)",
          "return values.whole(given)", ("neurons",), f"{_SPLIT}/test_split.py"),
    Fault("split neurons", "a part begins where another does", "passes/split/state.py",
          "TensorPart(outer.whole if outer else name, block)",
          "TensorPart(outer.whole if outer else name, Block((0,) * len(block.shape), block.shape))",
          ("neurons",), f"{_SPLIT}/test_split.py"),
    Fault("halo", "a block reads one row too low", "passes/split/windows.py",
          "low = first * self.stride - self.padding", "low = first * self.stride - self.padding + (first > 0)",
          ("halo",), f"{_SPLIT}/test_windows.py"),
    Fault("halo", "the border is on the other side", "passes/split/windows.py",
          "[max(-low, 0), max(high - length, 0)]", "[max(high - length, 0), max(-low, 0)]", ("halo",),
          f"{_SPLIT}/test_windows.py"),
    # What only the engine does: for ``verify --train``
    Fault("engine", "replicated parameters count twice in the norm", "runtime/mesh/sharding.py",
          "index == 0 or isinstance(placement, Shard)", "index >= 0 or isinstance(placement, Shard)",
          ("samples",), "tests/distributed/test_engine_sharded.py|-k|whole_model and 2|-m|", True),
    Fault("engine", "a norm of norms is not squared", f"{_RUN}/gradient_norm.py",
          'collectives.all_reduce(norm**norm_type, "the gradient norm")',
          'collectives.all_reduce(norm, "the gradient norm")', ("stages",), _COURSE, True),
    Fault("engine", "a checkpoint's blocks are all at the beginning", "partitioner/engine/checkpoints.py",
          "self._state.own_block(name, shape).offsets, shape)", "(0,) * len(shape), shape)",
          ("zero3",), _CHECKPOINTS, True),
    Fault("engine", "every rank loads the first samples", "partitioner/batches/part_batch.py",
          "found.append((start + self.rank * part, start + (self.rank + 1) * part))",
          "found.append((start, start + part))", ("samples",),
          "tests/distributed/test_data_sharded.py|-k|parts_train", True),
    Fault("engine", "a resumed loader begins its epoch anew", "partitioner/batches/loader.py",
          'self.epoch, self.position, self._loop = state["epoch"], state["position"], None',
          'self.epoch, self.position, self._loop = state["epoch"], 0, None', ("stages",),
          "tests/distributed/test_data.py|-k|resumed", True),
    Fault("engine", "16-bit gradients are summed in 16 bits", "cost_models/precision.py",
          "leaf if leaf.itemsize >= ACCUMULATION.itemsize else ACCUMULATION", "leaf", ("mixed",),
          "tests/distributed/test_precision.py|-k|one_rank_equals", True),
    Fault("engine", "rank 0 plays the plan's last device", "partitioner/deployment/agree.py",
          "ranks = ranks_in_order(plan)", "ranks = RankMap(plan.used_devices[::-1])", ("stages",),
          "tests/distributed/test_deploy.py", True),
    Fault("checkpoint", "the number of the step is not restored", "partitioner/engine/checkpoints.py",
          'run.step = record["step"]', 'run.step = 0 * record["step"]', ("stages",), _CHECKPOINT, True),
    Fault("checkpoint", "random states are not restored", "partitioner/engine/checkpoints.py",
          "_restore_random_states(states, self._device)", "pass", ("stages",),
          "tests/distributed/test_engine.py|-k|restored_step", True),
    Fault("optimizer shard", "an optimizer begins without its state", "runtime/checkpoint/optimizer.py",
          "state[number] = decode(saved_state, own)", "state[number] = {} if own else {}", ("stages",), _CHECKPOINT, True),
    Fault("optimizer shard", "blocks of moments are read from the beginning", "runtime/checkpoint/optimizer.py",
          "where = replace(place, name=tensor) if in_part",
          "where = replace(place, name=tensor, offsets=(0,) * len(shape)) if in_part",
          ("zero1",), _CHECKPOINTS, True),
)  # fmt: skip
"""Every fault, by area."""
