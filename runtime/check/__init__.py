"""The proof of a set of programs: everything sent is received, everything read is computed, nothing waits in a circle."""
