"""The shell around the core: node, engine thread, probe server."""
