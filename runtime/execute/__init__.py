"""The executor: one rank's program, instruction by instruction, on torch.distributed."""
