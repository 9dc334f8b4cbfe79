"""A plan on the ranks of a launch: who plays which device, what it holds, and the engine that it starts."""
