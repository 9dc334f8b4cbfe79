"""The costs of stages: recipes of their pieces at prices of memory, ranges of pieces, and mixes of recipes."""
