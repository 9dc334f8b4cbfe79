#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.pipelining: ScheduleZBVZeroBubble(..., defer_pp_recv=True) on two ranks trains on mixed-up
# micro-batches and raises nothing. Posting receives later changes their order, while messages between two ranks have no
# tags: what was sent first is received first, for whichever micro-batch or stage asks first. Loss and gradients are wrong;
# without the option, and for ScheduleInterleaved1F1B with it, they are those of the whole model. Gloo, float64.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install -qq --disable-pip-version-check torch==2.13.0 numpy==2.3.4
cat >"$work/late.py" <<'PY'
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleZBVZeroBubble

RANKS, MICROBATCHES = 2, 8

def layer(index):
    torch.manual_seed(index)
    return nn.Linear(4, 4).double()

def loss_of(output, target):
    return (output - target).square().mean()

def train(rank, port, made, stages_of, late, answer):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    own = stages_of[rank]
    layers = [layer(index) for index in own]
    stages = [PipelineStage(m, i, 2 * RANKS, torch.device("cpu")) for m, i in zip(layers, own)]
    schedule = made(stages, n_microbatches=MICROBATCHES, loss_fn=loss_of, defer_pp_recv=late)
    torch.manual_seed(100)
    inputs, targets = (torch.randn(MICROBATCHES, 4, dtype=torch.float64) for _ in range(2))
    is_last = 2 * RANKS - 1 in own
    schedule.step(*((inputs,) if 0 in own else ()), target=targets if is_last else None)
    whole = nn.Sequential(*(layer(index) for index in range(2 * RANKS)))
    loss_of(whole(inputs), targets).backward()
    answer[rank] = max((m.weight.grad - whole[i].weight.grad).abs().max().item() for m, i in zip(layers, own))
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    print("torch", torch.__version__.partition("+")[0])
    answer = mp.get_context("spawn").Manager().dict()
    for number, (made, stages_of) in enumerate(((ScheduleInterleaved1F1B, [[0, 2], [1, 3]]), (ScheduleZBVZeroBubble, [[0, 3], [1, 2]]))):
        for late in (False, True):
            mp.spawn(train, (int(sys.argv[1]) + 2 * number + late, made, stages_of, late, answer), nprocs=RANKS)
            off = max(answer.values())
            print(made.__name__, "late receives" if late else "as it is", "->", "right" if off < 1e-9 else f"gradients off by {off:.3f}")
PY
port=$((20000 + RANDOM % 20000))
env -u PYTHONPATH OMP_NUM_THREADS=1 timeout 300 "$work/venv/bin/python" -W ignore "$work/late.py" "$port" | tee "$work/out"
grep -q "torch 2.13.0" "$work/out"
grep -q "ScheduleInterleaved1F1B late receives -> right" "$work/out"
grep -q "ScheduleZBVZeroBubble as it is -> right" "$work/out"
grep -q "ScheduleZBVZeroBubble late receives -> gradients off" "$work/out"
