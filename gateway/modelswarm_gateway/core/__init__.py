"""The gateway's half of the protocol as a sans-I/O state machine: no clock, no sockets."""
