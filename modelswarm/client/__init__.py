"""Clients of the gateway: OpenAI HTTP, gRPC Inference, gRPC Swarm."""
