"""What clients talk to: the OpenAI HTTP API and gRPC."""
