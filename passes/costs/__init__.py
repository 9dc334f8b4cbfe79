"""The costs of every op: arithmetic, memory traffic, seconds, and what autograd keeps for backward."""
