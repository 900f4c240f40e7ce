"""Live migration of sessions: drain, rebalancing, cutover."""
