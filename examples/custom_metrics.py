"""A model and a loss of your own, metrics beside the loss, and a log of every step as CSV.

    torchrun --nproc-per-node 2 examples/custom_metrics.py --csv metrics.csv

``loss_fn(output, batch)`` may return ``(loss, {name: a tensor without dimensions})``. Metrics are computed where the loss
is, micro-batch by micro-batch, and mean what they would mean on the whole batch.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

from partitioner import ClusterSpec, CsvLogger, deploy

arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
arguments.add_argument("--epochs", type=int, default=5)
arguments.add_argument("--csv", default="metrics.csv")
given = arguments.parse_args()


def loss_and_metrics(output, batch):
    accuracy = (output.argmax(-1) == batch["label"]).float().mean()
    confidence = output.softmax(-1).amax(-1).mean()
    return F.cross_entropy(output, batch["label"]), {"accuracy": accuracy, "confidence": confidence}


class Classifier(nn.Module):
    def __init__(self, width=256, classes=10):
        super().__init__()
        self.read = nn.Linear(64, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(6))
        self.write = nn.Linear(width, classes)

    def forward(self, pixels):
        x = self.read(pixels)
        for block in self.blocks:
            x = x + F.gelu(block(x))
        return self.write(x)


torch.manual_seed(0)
pixels = torch.randn(1024, 64)
labels = (pixels @ torch.randn(64, 10)).argmax(-1)
dataset = [{"pixels": pixel, "label": label} for pixel, label in zip(pixels, labels, strict=True)]

with deploy(
    Classifier(),
    ClusterSpec.local(2),
    example_inputs={"pixels": pixels[:2], "label": labels[:2]},
    loss_fn=loss_and_metrics,
    batch_size=64,
    optimizer=torch.optim.AdamW,
    callbacks=[CsvLogger(given.csv)],
) as engine:
    loader = engine.dataloader(dataset, shuffle=True)
    for _ in range(given.epochs):
        for batch in loader:
            engine.train_step(batch)
    if engine.rank == 0:
        found = {name: round(metric.item(), 3) for name, metric in engine.last_step.metrics.items()}
        print(f"step {engine.step}: loss {engine.last_step.loss:.3f}, {found}; every step is in {given.csv}")
torch.distributed.destroy_process_group()
