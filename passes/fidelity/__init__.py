"""Steps of the live module and of its trace, and their agreement: hooks, random numbers and state that export forgets."""
