"""Grammars at the tail: matchers of sessions, and the masks that they put on logits."""
