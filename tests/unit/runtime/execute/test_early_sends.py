"""Values sent from inside a segment, in the order of the program."""

from __future__ import annotations

import torch

from runtime.execute.early_sends import EarlySends, early_outputs, following_sends
from runtime.program.program import Forward, Send
from tests.distributed import hand_model as hand


def test_which_values_are_worth_it() -> None:
    program = hand.programs("forward-backward", (0, 1, 2, 3), 2)[0]
    code = hand.codes()[0]
    assert [code.outputs[at].name for at in early_outputs(code, program)] == [
        "h",
        "mask",
        "twice",
    ]  # d is last


def test_only_the_sends_right_behind_the_forward_are_taken() -> None:
    program = hand.programs("forward-backward", (0, 1, 2, 3), 2)[0]
    produced = {"h": 0, "mask": 1, "twice": 2}
    position = program.instructions.index(Forward(0, 1))
    found = following_sends(program, position, produced)
    assert found
    for offset, (at, output) in enumerate(found):
        send = program.instructions[at]
        assert at == position + 1 + offset
        assert isinstance(send, Send)
        assert send.message.microbatch == 1
        assert produced[send.message.value] == output


def test_a_later_send_waits_for_the_earlier_one() -> None:
    sent: list[str] = []
    sends = EarlySends()
    sends.start([(1, lambda t: sent.append(f"mask{t.item()}")), (0, lambda t: sent.append(f"h{t.item()}"))])
    sends.emit(0, torch.tensor(5))
    assert sent == []
    sends.emit(1, torch.tensor(6))
    assert sent == ["mask6", "h5"]
    sends.emit(2, torch.tensor(7))  # nothing waits for it
    assert sent == ["mask6", "h5"]
    sends.start([])
    sends.emit(0, torch.tensor(5))
    assert len(sent) == 2
