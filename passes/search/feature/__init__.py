"""The feature-wise search: a mesh, and how every op and parameter is sharded on it."""
