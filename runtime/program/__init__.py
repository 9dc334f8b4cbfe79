"""The instructions of a rank, and the one global order in which all ranks communicate."""
