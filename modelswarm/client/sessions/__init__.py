"""Sessions over the gateway's gRPC door: a context that the servers keep between steps."""
