"""A rank's place on a mesh of devices: the collectives along each axis, and which part of a tensor is its own."""
