"""What the gateway knows of each block server."""
