"""Links between two processes: handshake, lanes, gRPC streams."""
