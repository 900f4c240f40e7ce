"""Sessions over the gateway's gRPC API: a context that the servers keep between steps."""
