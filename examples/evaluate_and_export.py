"""Evaluate a model while it is spread over processes, save it for ``from_pretrained``, and load it again.

torchrun --nproc-per-node 2 examples/evaluate_and_export.py --folder exported
"""

import argparse

import torch
from byte_text import WindowsOfText
from torch.utils.data import Subset, default_collate
from transformers import LlamaConfig, LlamaForCausalLM

from partitioner import ClusterSpec, deploy

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("--folder", default="exported")
given = arguments.parse_args()

torch.manual_seed(0)
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, tie_word_embeddings=True, **shape))
text = WindowsOfText(256)
training, held_out = Subset(text, range(192)), Subset(text, range(192, 256))
example = default_collate([text[0], text[1]])

with deploy(model, ClusterSpec.local(2), example_inputs=example, batch_size=16, learning_rate=3e-3) as engine:
    for batch in engine.dataloader(training, shuffle=True):
        engine.train_step(batch)
    losses = [engine.eval_step(batch).loss for batch in engine.dataloader(held_out)]
    prompts = default_collate([held_out[i] for i in range(4)])
    here = engine.eval_step(prompts, gather="rank0").outputs  # or engine.forward(prompts), without labels
    weights = engine.state_dict()  # everything on rank 0, nothing elsewhere

if engine.rank == 0:
    print(f"held-out loss {torch.stack(losses).mean():.4f}")
    model.load_state_dict(weights)  # training left `model` as it was
    model.save_pretrained(given.folder)
    again = LlamaForCausalLM.from_pretrained(given.folder).eval()
    with torch.no_grad():
        there = again(**prompts).logits
    print(f"largest difference of the logits: {(here['logits'] - there).abs().max():.2g}")
torch.distributed.destroy_process_group()
