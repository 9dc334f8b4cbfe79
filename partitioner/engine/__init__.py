"""Training of a deployed plan: steps, one optimizer over all ranks, checkpoints, logs, profiles."""
