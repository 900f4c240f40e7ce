"""The Kubernetes operator: turns a ModelSwarm into block-server pods and keeps them running."""
