"""Opaque parts of a model: which they are, how they pass through the export as one op each, and what they return."""
