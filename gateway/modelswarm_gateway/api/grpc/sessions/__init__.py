"""Sessions over gRPC: the bidirectional stream, and the calls that show and close a session."""
