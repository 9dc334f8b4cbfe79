"""A check of this machine: what is there, and what will not work here and what to do about it."""
