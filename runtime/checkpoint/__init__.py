"""Checkpoints on disk: directories of them, files in the safetensors format, tensors of which ranks hold blocks."""
