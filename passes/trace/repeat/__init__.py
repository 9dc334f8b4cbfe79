"""Equal blocks of a model: traced once, and written again into the graph for every further one."""
