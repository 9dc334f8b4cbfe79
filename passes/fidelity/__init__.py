"""The traced graph held against the live module: hooks, random numbers and Python state that export forgets."""
