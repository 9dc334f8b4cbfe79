"""Ops that PyTorch does not have: bridges with their conjugates, and parts of ops that talk to other ranks."""
