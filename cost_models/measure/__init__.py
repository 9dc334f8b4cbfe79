"""Calibration of CPU workers or of a GPU: ops by shape and type, overheads, links; measured as data, fitted to rates."""
