"""Rows of numbers beside tokens: logits and hidden states that answers return, and hidden states as input."""
