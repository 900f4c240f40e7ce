"""The interceptor of the gRPC servers: requests that no method gets."""
