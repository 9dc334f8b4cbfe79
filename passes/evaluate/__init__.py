"""The same placement for other graphs of the model: in evaluation mode, and in float64 for verification."""
