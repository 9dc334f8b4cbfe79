"""The way from a placement to a step: bridges, segments, their code, programs, and the simulated step."""
