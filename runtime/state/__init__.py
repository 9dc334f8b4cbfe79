"""The tensors that a rank holds between steps: parameters, buffers, gradients, and their data types."""
