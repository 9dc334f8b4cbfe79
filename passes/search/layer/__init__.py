"""The layer-wise search: cuts of the model into stages, their devices, schedule and micro-batches."""
