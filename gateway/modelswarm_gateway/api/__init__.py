"""The APIs for clients: OpenAI's over HTTP, and gRPC."""
