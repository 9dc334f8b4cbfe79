"""Formats of other tools: what they say of parallelism, read and written.

    plan ─► parallelism_of ─► Parallelism ─► a tool's own files          partitioner export
    a tool's own files ─► Parallelism ─► --fix ─► plan                   partitioner check

Every tool has one module, with what it writes and what it reads. ``Parallelism`` is what lies between: the degrees that all
of them share. What one of them cannot say is refused with the reason, and what its runtime does otherwise is a note.
"""
