"""Sizes of a model that degrees have to divide."""

from __future__ import annotations

from collections.abc import Mapping

NAMES = {
    "attention heads": ("num_attention_heads", "n_head", "num_heads"),
    "key-value heads": ("num_key_value_heads",),
}
"""The names that configurations of transformers models have for them."""


def sizes_of(model: object) -> Mapping[str, int]:
    """Return the heads of a model by name, as far as its configuration says them."""
    config = getattr(model, "config", None)
    found = {}
    for name, attributes in NAMES.items():
        values = [value for a in attributes if isinstance(value := getattr(config, a, None), int)]
        if values:
            found[name] = values[0]
    return found
