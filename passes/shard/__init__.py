"""Sharding: its words, and the way from a placement on a mesh to the graph that every rank runs on its shards."""
