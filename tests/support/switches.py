"""A switch that a test turns between the layers of a model."""

FLAG = 0
