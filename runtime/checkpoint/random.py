"""The states of the random number generators that a training script draws from, as tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_states(device: torch.device) -> dict[str, Tensor]:
    """Return the states of this process's generators: torch's (and the device's), Python's and numpy's."""
    version, words, gauss = random.getstate()
    legacy: tuple[Any, ...] = tuple(np.random.get_state())
    _, key, position, has_gauss, cached = legacy
    states = {
        "torch": torch.get_rng_state(),
        # All are whole numbers below 2^32, or a float64: exact.
        "python": torch.tensor([version, math.nan if gauss is None else gauss, *words], dtype=torch.float64),
        "numpy": torch.tensor([position, has_gauss, cached, *key.tolist()], dtype=torch.float64),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_random_states(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Set the generators of this process to what ``random_states`` returned."""
    torch.set_rng_state(states["torch"])
    version, gauss, *words = states["python"].tolist()
    random.setstate((int(version), tuple(map(int, words)), None if math.isnan(gauss) else gauss))
    position, has_gauss, cached, *key = states["numpy"].tolist()
    words32 = np.array(list(map(int, key)), dtype=np.uint32)
    np.random.set_state(("MT19937", words32, int(position), int(has_gauss), cached))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)
