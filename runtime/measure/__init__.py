"""Measurements of a run that is under way: its instructions' times, and a record of what every op computed."""
