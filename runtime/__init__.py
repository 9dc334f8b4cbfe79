"""Programs of ranks and the three interpreters that read them: the checker, the simulator, the executor."""
