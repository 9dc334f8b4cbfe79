"""The vocabulary that all searches share: requests, the judge, outcomes, pins, bounds, certificates, baselines."""
