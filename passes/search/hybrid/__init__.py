"""The hybrid search: pipelines of stages that device groups share, with what the user fixed of them."""
