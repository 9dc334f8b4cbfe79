"""Hardware and closed forms: what a cluster is made of, and how long a computation or a transfer takes on it."""
