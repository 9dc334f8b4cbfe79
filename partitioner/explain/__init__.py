"""Answers about a plan: what else an op could have been and at which price, and what one rank runs."""
