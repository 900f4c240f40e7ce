"""The gRPC API: the Inference and Swarm services."""
