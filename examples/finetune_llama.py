"""Fine-tune a Llama on two processes; run it again after an interruption and it goes on where the last checkpoint was.

    torchrun --nproc-per-node 2 examples/finetune_llama.py --checkpoints /tmp/llama

The model is small and random, so that nothing is downloaded: in your script it is
``LlamaForCausalLM.from_pretrained(...)``, or a model on the meta device and ``weights="a/folder"``.
"""

import argparse

import torch
from byte_text import WindowsOfText
from torch.utils.data import default_collate
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from partitioner import ClusterSpec, deploy, is_checkpoint

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("--epochs", type=int, default=4)
arguments.add_argument("--samples", type=int, default=512)
arguments.add_argument("--save-every", type=int, default=20, help="steps")
arguments.add_argument("--checkpoints", default="checkpoints")
given = arguments.parse_args()

torch.manual_seed(0)
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **shape))
dataset = WindowsOfText(given.samples)  # dataset[i] is {"input_ids": ..., "labels": ...}

with deploy(
    model,
    ClusterSpec.local(2),
    example_inputs=default_collate([dataset[0], dataset[1]]),
    batch_size=16,
    optimizer=torch.optim.AdamW,
    optimizer_kwargs={"lr": 3e-3, "weight_decay": 0.01},
) as engine:
    loader = engine.dataloader(dataset, shuffle=True)
    steps = given.epochs * len(loader)
    scheduler = get_cosine_schedule_with_warmup(engine.optimizer, steps // 10, steps)
    if is_checkpoint(given.checkpoints):
        extra = engine.load(given.checkpoints)
        scheduler.load_state_dict(extra["scheduler"])
        loader.load_state_dict(extra["loader"])
    for _ in range(loader.epoch, given.epochs):
        for batch in loader:
            loss = engine.train_step(batch, max_grad_norm=1.0)
            scheduler.step()
            if engine.rank == 0:
                print(f"step {engine.step}: loss {loss:.4f}", flush=True)
            if engine.step % given.save_every == 0 or engine.step == steps:
                extra = {"scheduler": scheduler.state_dict(), "loader": loader.state_dict()}
                engine.save(given.checkpoints, extra=extra)
torch.distributed.destroy_process_group()
