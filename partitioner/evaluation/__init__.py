"""Loss, metrics and outputs of a deployed model in evaluation mode, for batches of any size."""
