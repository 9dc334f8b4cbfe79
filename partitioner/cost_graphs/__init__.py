"""Cost graphs from files: one reader per format, all into a ``PlacementGraph``."""
