"""Words and tables for people: plans, differences, drawings, launch commands, profiles."""
