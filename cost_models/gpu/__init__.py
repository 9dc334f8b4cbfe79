"""Calibration of one kind of GPU: ops by shape and type, overheads, memory, links; measured as data, fitted to rates."""
