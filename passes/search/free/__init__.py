"""The free search: any op, or any block of its neurons, on any device."""
