"""How often Python looks for garbage in tests: its own numbers cost a twentieth of all time, measured on traces."""

RARELY = (50_000, 20, 20)
"""Objects and collections between collections, as ``gc.set_threshold`` takes them."""
