"""The OpenAPI document of the HTTP API: every path, request field, answer and error."""
