"""The plan of a swarm run as processes of this machine: `modelswarm up` without a cluster."""
