"""Runs a swarm as processes of this machine: `modelswarm up`, without a cluster."""
