"""The client of a Kubernetes API server that gateway and operator share. Nothing else of `modelswarm` imports it."""
