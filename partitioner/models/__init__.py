"""The models that can be planned: bundled ones, Hugging Face configurations, a user's own, each with a batch."""
