"""The plan as data: its fields, its file, the checks between them, and the way back to programs."""
