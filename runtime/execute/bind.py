"""Turn a rank's program into a list of ready-to-call handlers, once per batch shape.

Each instruction becomes one closure over preallocated lists; a step then is a loop over them. Everything that
can be known beforehand is: shapes, tags, which receive which compute waits for, who reads a value last.

Tensors wait in lists, by slot = number of the value × micro-batches + micro-batch, or by position in the program:

    leaves[slot]       a received or local value as its consumers read it; their gradients meet in its .grad
    outgoing[slot]     a produced value until its last send is issued
    works[position]    the pending work of the communication at that position
    arrived[position]  the gradient received there, until the producer's backward takes it
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from runtime.execute.context import ProgramContext, Shared
from runtime.execute.early_sends import EarlySends, PostTensor, following_sends
from runtime.execute.pieces import MovedPieces
from runtime.execute.positions import positions, shape_check, sorted_outputs
from runtime.execute.reduce import GradientReduction, ScatteredReduction, overlap
from runtime.program.program import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Instruction,
    Message,
    OptimizerStep,
    Recv,
    ReduceGradients,
    Send,
)
from runtime.ranks.groups import TAG_BASE, Channel
from runtime.segment.runner import as_leaf, gradient_of

Handler = Callable[[], None]


class Binder:
    """The handlers of one program for one batch shape."""

    def __init__(self, context: ProgramContext, shared: Shared) -> None:
        self.context, self.shared = context, shared
        instructions = context.program.instructions
        count = shared.microbatches
        self.leaves: list[Tensor | None] = [None] * (len(context.own.graph.values) * count)
        self.outgoing: list[Tensor | None] = [None] * len(self.leaves)
        self.works: list[Any] = [None] * len(instructions)
        self.arrived: list[Tensor | None] = [None] * len(instructions)
        self.reductions: list[GradientReduction] = []
        self._on_gpu = context.around.device.type == "cuda"
        self._timeout = timedelta(seconds=context.around.monitor.wait_seconds)
        self._pieces = MovedPieces(context, shared)
        self._at = positions(context, self._pieces, self.slot)
        self._posts: dict[int, PostTensor] = {
            p: self._post(p, i.message, context.channels[i.queue])
            for p, i in enumerate(instructions)
            if isinstance(i, Send)
        }
        self.handlers = [self._bind(p, instruction) for p, instruction in enumerate(instructions)]
        overlap(
            instructions,
            self.handlers,
            self.reductions,
            context.own.graph,
            lambda segment: context.own.codes[segment].held,
        )
        for p, instruction in enumerate(instructions):
            if isinstance(instruction, Compute) and context.own.codes[instruction.segment].mesh is not None:
                self.handlers[p] = self._shared(p, self.handlers[p])

    def slot(self, value: str, microbatch: int) -> int:
        return self.context.value_numbers[value] * self.shared.microbatches + microbatch

    def wait(self, position: int) -> None:
        """Wait for the communication at ``position``; a failure is explained by the executor."""
        work = self.works[position]
        if work is None:
            return
        self.works[position] = None
        monitor = self.context.around.monitor
        monitor.waiting = number = self.shared.first_wait + position
        if self._on_gpu:
            work.wait()  # the stream waits, not this thread; with a time limit, the thread would
            self.context.around.waited.append((number, work))
        else:
            work.wait(self._timeout)
        monitor.waiting = -1
        self._pieces.put(position)

    def finish(self) -> None:
        """Wait for whatever is still under way."""
        for position in range(len(self.works)):
            self.wait(position)
        for reduction in self.reductions:
            self.wait(reduction.position)
            reduction.finish()

    def clear(self) -> None:
        """Drop every tensor of a failed step."""
        for held in (self.leaves, self.outgoing, self.works, self.arrived):
            held[:] = [None] * len(held)
        self._pieces.clear()
        for reduction in self.reductions:
            reduction.discard()

    def _bind(self, position: int, instruction: Instruction) -> Handler:
        match instruction:
            case Forward(segment=segment, microbatch=microbatch):
                return self._forward(position, segment, microbatch)
            case Backward(segment=segment, microbatch=microbatch):
                run = self.context.runners[segment].backward
                return self._backward(position, segment, microbatch, run)
            case BackwardInput(segment=segment, microbatch=microbatch):
                run = self.context.runners[segment].backward_input
                return self._backward(position, segment, microbatch, run)
            case BackwardWeight(segment=segment, microbatch=microbatch):
                run_weight = self.context.runners[segment].backward_weight
                return lambda: run_weight(microbatch)
            case Send(message=message):
                return self._send(position, message)
            case Recv(message=message, queue=queue):
                return self._recv(position, message, self.context.channels[queue])
            case ReduceGradients(queue=queue):
                return self._reduce(position, instruction, self.context.channels[queue])
            case OptimizerStep():  # whoever trains steps, once sums are over
                return _nothing

    def _shared(self, position: int, handler: Handler) -> Handler:
        """Return ``handler``, of a compute that waits for other ranks inside, with its number set for ``SegmentWait``."""
        monitor, shared = self.context.around.monitor, self.shared

        def run() -> None:
            monitor.running = shared.first_wait + position
            handler()

        return run

    # ------------------------------------------------------------------------------------------------------
    # Compute

    def _forward(self, position: int, segment: int, microbatch: int) -> Handler:
        context, shared, leaves, outgoing, wait = (
            self.context,
            self.shared,
            self.leaves,
            self.outgoing,
            self.wait,
        )
        code, runner = context.own.codes[segment], context.runners[segment]
        training, forward = context.training, runner.forward
        waits = self._at.waits_at.get(position, [])
        pieces = [shared.pieces[name] for name in runner.leaf_names]
        reads = [
            (self.slot(i.name, microbatch), i.needs_grad and training)
            for i in code.inputs
            if i.kind == "value"
        ]
        drops = [s for s, grad in reads if not grad and self._at.last_forward[s] == position]
        sent, local, loss_position, metrics, results = sorted_outputs(
            code,
            lambda value: self.slot(value, microbatch),
            sent=self._at.last_send,
            read=self._at.last_forward,
            training=training,
        )
        check = shape_check(code, shared.shapes[microbatch])
        seeded = context.around.seeded.run if code.random else None
        early, early_queue = self._early_sends(position, segment)

        def run() -> None:
            for p in waits:
                wait(p)
            values: list[Any] = []
            for slot, needs_grad in reads:
                leaf = leaves[slot]
                if needs_grad:
                    if not leaf.requires_grad:  # type: ignore[union-attr]
                        leaf.requires_grad_()  # type: ignore[union-attr]
                elif leaf.requires_grad:  # type: ignore[union-attr]
                    leaf = leaf.detach()  # type: ignore[union-attr]
                values.append(leaf)
            batch = [piece[microbatch] for piece in pieces]
            if early is not None:
                early.start(early_queue)
            if seeded is None:
                outputs = forward(microbatch, values, batch, keep=training)
            else:
                outputs = seeded(
                    shared.step,
                    segment,
                    microbatch,
                    lambda: forward(microbatch, values, batch, keep=training),
                )
            if not shared.checked:
                check(outputs)
            for at, slot in sent:
                outgoing[slot] = outputs[at].detach()
            for at, slot, needs_grad in local:
                leaves[slot] = as_leaf(outputs[at], needs_grad)
            if loss_position >= 0:
                shared.losses[microbatch] = outputs[loss_position].detach()
            for at, name in metrics:
                shared.metrics[microbatch][name] = outputs[at].detach()
            for at, name in results if shared.outputs else ():
                shared.outputs[microbatch][name] = outputs[at].detach()
            for slot in drops:
                leaves[slot] = None

        return run

    def _backward(
        self,
        position: int,
        segment: int,
        microbatch: int,
        run_backward: Callable[[int, list[Tensor | None]], None],
    ) -> Handler:
        shared, leaves, arrived, wait = self.shared, self.leaves, self.arrived, self.wait
        seeds, add_parts = shared.seeds, self._pieces.add
        waits = self._at.waits_at.get(position, [])
        roots: list[tuple[int, list[int]] | None] = []
        for at in self.context.runners[segment].root_positions:
            output = self.context.own.codes[segment].outputs[at]
            if output.kind == "loss":
                roots.append(None)
                continue
            slot = self.slot(output.name, microbatch)
            local = slot if slot in self._at.last_forward else -1
            roots.append((local, self._at.gradients_of.get((output.name, microbatch), [])))
        # Where several ranks have all of a gradient, some of them send none of it.
        read = [self.slot(name, microbatch) for name in self.context.runners[segment].value_names]
        unsent = [slot for slot in read if self._at.unsent_after.get(slot) == position]

        def run() -> None:
            for p in waits:
                wait(p)
            gradients: list[Tensor | None] = []
            for root in roots:
                if root is None:
                    seed = seeds[microbatch]
                    if seed is None:
                        loss = shared.losses[microbatch]
                        assert loss is not None
                        seed = torch.full_like(loss, shared.weights[microbatch] * shared.gradient_scale)
                        seeds[microbatch] = seed
                    gradients.append(seed)
                    continue
                slot, remote = root
                total: Tensor | None = None
                if slot >= 0:
                    total = leaves[slot].grad  # type: ignore[union-attr]
                    leaves[slot] = None
                for p in remote:
                    add_parts(p)
                    gradient = arrived[p]
                    arrived[p] = None
                    total = gradient if total is None else total + gradient  # type: ignore[operator]
                gradients.append(total)
            run_backward(microbatch, gradients)
            for slot in unsent:
                leaves[slot] = None

        return run

    # ------------------------------------------------------------------------------------------------------
    # Communication

    def _tag(self, message: Message) -> int:
        return TAG_BASE + 2 * self.slot(message.value, message.microbatch) + message.gradient

    def _post(self, position: int, message: Message, channel: Channel) -> PostTensor:
        """Return the function that puts the tensor of one message on its way."""
        tag, peer, post = self._tag(message), channel.rank_in_group[message.target], channel.group.send
        piece = self._pieces.of(message, message.target)
        is_complex = self.shared.shapes[message.microbatch][message.value][1].is_complex
        works, monitor, shared = self.works, self.context.around.monitor, self.shared

        def run(tensor: Tensor) -> None:
            if piece is not None:
                tensor = piece.of(tensor)
            if not tensor.is_contiguous():  # Gloo would refuse here and leave the peer waiting
                tensor = tensor.contiguous()
            if is_complex:
                tensor = torch.view_as_real(tensor.resolve_conj())
            elif tensor.is_neg():  # such as the imaginary part of a conjugate: the sign is not in memory yet
                tensor = tensor.resolve_neg()
            monitor.waiting = shared.first_wait + position
            works[position] = post([tensor], peer, tag)
            monitor.waiting = -1

        return run

    def _send(self, position: int, message: Message) -> Handler:
        slot, post, works = self.slot(message.value, message.microbatch), self._posts[position], self.works
        leaves, outgoing = self.leaves, self.outgoing
        last = position in (self._at.last_send.get(slot), self._at.last_return.get(slot))

        def send_gradient() -> None:
            post(gradient_of(leaves[slot]))  # type: ignore[arg-type]
            if last:
                leaves[slot] = None

        def send_value() -> None:
            if works[position] is None:  # else the segment sent it early
                post(outgoing[slot])  # type: ignore[arg-type]
            if last:
                outgoing[slot] = None

        return send_gradient if message.gradient else send_value

    def _recv(self, position: int, message: Message, channel: Channel) -> Handler:
        slot, tag = self.slot(message.value, message.microbatch), self._tag(message)
        peer, post, works = channel.rank_in_group[message.source], channel.group.recv, self.works
        shape, dtype = self.shared.shapes[message.microbatch][message.value]
        held, at = (self.leaves, slot)
        if message.gradient:
            held, at = self.arrived, self._pieces.keeper(position, message)
        device, is_complex = self.context.around.device, dtype.is_complex
        monitor, shared, pieces = self.context.around.monitor, self.shared, self._pieces
        piece = pieces.of(message, message.source)

        def run() -> None:
            buffer = held[at]
            if piece is None or buffer is None:
                buffer = held[at] = torch.empty(shape, dtype=dtype, device=device)
            if piece is not None:
                buffer = pieces.receiver(position, message, piece, buffer)
            if is_complex:
                buffer = torch.view_as_real(buffer)
            monitor.waiting = shared.first_wait + position
            works[position] = post([buffer], peer, tag)
            monitor.waiting = -1

        return run

    def _reduce(self, position: int, instruction: ReduceGradients, channel: Channel) -> Handler:
        context = self.context
        leaves = {name: context.own.state[name] for name in instruction.parameters}
        reduction = GradientReduction(position, leaves, context.sums, context.fresh)
        if instruction.scattered:
            dims, axis = context.scattered(instruction)
            reduction = ScatteredReduction(position, leaves, context.sums, dims, axis)
        before = [r for r in self.reductions if not leaves.keys().isdisjoint(r.parameters)]
        self.reductions.append(reduction)
        works, group = self.works, channel.group

        def run() -> None:
            if reduction.started:  # while backward was running
                return
            for other in before:  # of the same gradients
                self.wait(other.position)
                other.finish()
            works[position] = reduction.start(
                lambda flat: dist.all_reduce(flat, op=dist.ReduceOp.SUM, group=group, async_op=True)
            )

        return run

    # ------------------------------------------------------------------------------------------------------

    def _early_sends(
        self, position: int, segment: int
    ) -> tuple[EarlySends | None, list[tuple[int, PostTensor]]]:
        if segment not in self.context.early:
            return None, []
        positions, sends = self.context.early[segment]
        produced = {self.context.own.codes[segment].outputs[at].name: at for at in positions}
        following = following_sends(self.context.program, position, produced)
        return sends, [(at, self._posts[p]) for p, at in following]


def _nothing() -> None:
    """Do nothing."""
