"""Verification: the plan's own programs on local processes, compared number by number with the unpartitioned model."""
