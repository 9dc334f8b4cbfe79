"""The graph of one segment while it runs: forward, backward in one piece or in halves, recomputed, compiled."""
