"""Train GPT-2 over bytes on two processes: torchrun --nproc-per-node 2 examples/train_gpt.py"""

import torch
from byte_text import batches, gpt

from partitioner import ClusterSpec, deploy

options = {"optimizer": torch.optim.AdamW, "optimizer_kwargs": {"lr": 3e-3}}
with deploy(gpt(), ClusterSpec.local(2), batch_size=16, **options) as engine:
    for step, batch in enumerate(batches(engine.plan.batch_size, steps=30)):
        loss = engine.train_step(batch)
        if torch.distributed.get_rank() == 0:
            print(f"step {step}: loss {loss:.3f}", flush=True)
torch.distributed.destroy_process_group()
