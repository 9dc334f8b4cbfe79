"""``OpGraph``, the one data structure of all passes, and the questions that can be asked of it."""
