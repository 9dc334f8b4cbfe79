"""The normal form of a graph: functional ATen ops, explicit casts, nothing written that another op sees."""
