"""What a block server runs: the transformer span, or the hash model of the protocol tests."""
