"""Checks of a model's config.json: its fields, its rope, and what no server can run."""
