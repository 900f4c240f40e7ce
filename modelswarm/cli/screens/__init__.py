"""Screens about a running swarm: its servers, sessions and routes as tables."""
