"""Ops in blocks of neurons: parameters in parts, and the readers that go on in blocks."""
