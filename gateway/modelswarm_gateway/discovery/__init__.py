"""Service discovery: which block servers are dialled, and readiness."""
