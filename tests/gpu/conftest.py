"""These tests need a GPU; without one they are not collected, so that a run never claims to have passed them."""

from __future__ import annotations

import torch

if not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]
