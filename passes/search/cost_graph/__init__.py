"""Placements of cost graphs that are no traced models: contiguous, free, for latency, or laid out over all devices."""
