"""The loss of a batch, put together from the losses of its micro-batches."""
