"""Models of a block server: the transformer span, and the hash model of the protocol tests."""
