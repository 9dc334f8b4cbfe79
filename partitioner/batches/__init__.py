"""A user's batches on their way to the ranks: loaded where they are read, cut, checked, the same everywhere."""
