"""Cost graphs from files and their plans: one reader per format, all into a ``PlacementGraph``."""
