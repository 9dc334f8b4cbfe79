"""Cluster files from what machines and tools print: one reader per format, all into one file that names its sources."""
