"""Small models whose exported graphs are wrong, or go wrong when reordered, without the passes under test."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.relu(self.norm(self.first(x)))
        out = self.second(out)
        out += x
        return self.relu(out)


class SmallResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(Residual(4), Residual(4))
        self.head = nn.Linear(4, 5)

    def forward(self, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        features = self.blocks(self.stem(image)).mean((2, 3))
        return F.cross_entropy(self.head(features), label)


class FrozenBranch(nn.Module):
    """The frozen branch's parameters do require gradients; only ``no_grad`` keeps it from being trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        trained = self.head(x)
        with torch.no_grad():
            feature = self.frozen(trained)
            with torch.enable_grad():
                inner = self.head(feature) * 2
            feature = feature + inner
        return (trained * feature + inner).pow(2).sum()


class AutocastModel(nn.Module):
    """Ops that autocast runs in low precision, in float32, at the widest type, and composites of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.second(F.gelu(self.first(x)))
            with torch.no_grad():
                frozen = self.second(h)
            h = h * frozen + self.first(h)  # first's weight is cast once, used twice
            both = torch.cat([h, x], -1)
            product = torch.einsum("bi,bj->ij", both, h)
            heads = F.scaled_dot_product_attention(
                h.view(-1, 1, 2, 4), h.view(-1, 1, 2, 4), x.view(-1, 1, 2, 4)
            )
            with torch.autocast("cpu", enabled=False):
                exact = self.second(x)
            loss = F.cross_entropy(self.first(heads.reshape(-1, 8)), label)
            loss = loss + F.mse_loss(h, exact) + product.square().mean()
        return loss.float()


class Views(nn.Module):
    """Writes through views, views of views and detached aliases; reads of bases and views before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        left, flat = h[:, :2], h.view(-1)
        squares = h.reshape(-1, 2, 2).transpose(1, 2)
        same, kept = h.contiguous(), F.dropout(h, 0.5, False)
        early = h.sum()
        h[:, 0].mul_(2)
        h[:, 1] = 0.5
        h[h > 1] = 0.25
        squares[:, 0].add_(x[:, :2])
        squares.permute(2, 0, 1)[0].mul_(3)
        h.narrow(1, 2, 1).sub_(0.125)
        h.unsqueeze(1).squeeze(1).expand(h.shape)[:, 3:].mul_(0.5)
        h.unflatten(1, (2, 2)).flatten(1)[:, 1:3].add_(0.75)
        turned = h.clone().t_()
        turned.add_(1)
        raised = h.clone().unsqueeze_(1)
        raised[:, 0, 1] = h[:, 0]
        rows = x.clone()
        first, second = rows.split(2, 1)
        rows.mul_(2)
        second = second + first
        out = torch.empty(4, 4, dtype=x.dtype)
        torch.mm(self.linear.weight.detach(), self.linear.weight.detach(), out=out)
        everything = [left, flat, squares, same, kept, early, h, turned, raised, second, out]
        return sum(
            (t.pow(2).sum() * (i + 1) for i, t in enumerate(everything)), torch.zeros((), dtype=x.dtype)
        )


class RareWrites(nn.Module):
    """In-place ops with irregular out-of-place forms."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        a = h.clone()
        a.masked_fill_(a < 0, 0.1)
        a.clamp_(min=-1, max=1).pow_(2)
        a.index_add_(0, torch.tensor([0, 1]), h[:2])
        a.index_copy_(1, torch.tensor([2]), h[:, :1])
        a.scatter_(1, torch.tensor([[0]]).expand(h.shape[0], 1), 0.75)
        b = torch.zeros_like(h)
        b.copy_(h[:, :1])
        b.addcmul_(h, h, value=0.5).div_(2.0).neg_()
        b.lerp_(h, 0.25)
        c = torch.ones(4, dtype=torch.long)
        c += 2
        c.__ior__(4)
        c.fill_(3).zero_().add_(c + 1)
        d = torch.view_as_complex(h.reshape(-1, 2, 2).clone())
        d.real.mul_(2)
        d.imag.add_(1)
        e = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=x.dtype)
        e[1] = 7.0
        f = torch.as_strided(e, (2, 2), (2, 1))
        f.mul_(2)
        g = (h > 0).logical_not_()
        i = self.linear.weight * 2
        i.fill_diagonal_(0.5)
        i = F.alpha_dropout(F.dropout(i, 0.0, inplace=True), 0.0, inplace=True)
        a = a @ i
        h = h + F.relu(h, inplace=False).clone().diagonal(0, 0, 1).mul_(2).sum()
        piece = torch.cat([h, h], 1)
        j = torch.zeros(h.shape[0], 3, 2, dtype=d.dtype)
        j[:, 1:] = (d * d)[:, None]
        j[..., -1, 0] = d[:, 1].conj()
        j.narrow(1, 0, 1).add_(d[:, None] * 1j)
        j.select(-1, -1).mul_(0.5)
        d = d + torch.view_as_real(j).sum()
        return (a * c).sum() + (b * e).pow(2).sum() + d.abs().sum() + f.sum() + (h * g).sum() + piece.sum()


class Buffers(nn.Module):
    """A running mean, a counter, a ring buffer: new contents are read in the same step, and reported."""

    ema: torch.Tensor
    steps: torch.Tensor
    ring: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("ema", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("ring", torch.zeros(3, 4))
        self.register_buffer("untouched", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x)
        before = self.ema.clone()
        with torch.no_grad():
            self.ema.mul_(0.9).add_(h.mean(0), alpha=0.1)
            self.ring[1].copy_(h.sum(0))
        self.steps += 1
        return (h * self.ema + before + self.ring.sum(0) + self.untouched).pow(2).sum() * self.steps


def language_model(name: str) -> tuple[nn.Module, dict[str, torch.Tensor], dict[str, int | None]]:
    """A tiny Hugging Face model in training mode without dropout, and a batch."""
    import transformers as hf

    torch.manual_seed(0)
    ids: Any = torch.randint(3, 60, (3, 7))
    if name == "t5":
        config = hf.T5Config(
            vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0, use_cache=False,
        )  # fmt: skip
        labels = torch.randint(3, 60, (3, 5))
        labels[:, -1] = -100
        return hf.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": labels}, {}
    if name == "whisper":
        config = hf.WhisperConfig(
            vocab_size=64, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_source_positions=10,
            max_target_positions=16, dropout=0.0, decoder_start_token_id=1, pad_token_id=0, bos_token_id=1,
            eos_token_id=2, use_cache=False, suppress_tokens=None, begin_suppress_tokens=None,
        )  # fmt: skip
        labels = torch.randint(3, 60, (3, 5))
        labels[:, -1] = -100
        features = torch.randn(3, 8, 20, dtype=torch.float64)
        return hf.WhisperForConditionalGeneration(config), {"input_features": features, "labels": labels}, {}
    config = hf.MixtralConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
        attention_dropout=0.0, use_cache=False, output_router_logits=True, experts_implementation="batched_mm",
    )  # fmt: skip  # the default, grouped_mm, has no float64 kernel
    return hf.MixtralForCausalLM(config), {"input_ids": ids, "labels": torch.randint(3, 60, (3, 7))}, {}
