"""The Kubernetes operator: a ModelSwarm becomes block-server pods and stays that way."""
