"""Links between two processes: handshake, lanes, message streams."""
