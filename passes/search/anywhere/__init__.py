"""Units on devices: the one placement problem of ops and of cost graphs, and what solves it."""
