"""Pictures of a plan: the report page, static figures, and the data that both draw."""
