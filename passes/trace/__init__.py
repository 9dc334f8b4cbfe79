"""The way from a model and an example batch to an ``OpGraph``, with errors in the user's words."""
