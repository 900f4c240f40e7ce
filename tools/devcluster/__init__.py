"""A real Kubernetes on this machine, built from its Go modules: `make cluster`."""
