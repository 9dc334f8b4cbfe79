"""The vocabulary that all searches share: requests, candidates, pins, bounds, certificates and comparisons."""
