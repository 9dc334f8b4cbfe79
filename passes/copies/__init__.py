"""Copies of a model and of its graph: with their tensors, in float64, without dropout."""
