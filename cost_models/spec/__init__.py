"""The cluster file: its sections and their fields, presets of hardware and software, and one error of all that is wrong."""
