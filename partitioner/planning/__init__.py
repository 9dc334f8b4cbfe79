"""A user's wishes as requests to the searches, and the best plan of several strategies."""
