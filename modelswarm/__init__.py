"""ModelSwarm: one large model served by many small pods, and no stream lost when a pod dies."""

__version__ = "0.1.0"
