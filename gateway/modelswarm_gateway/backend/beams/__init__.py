"""Beam search: the best of several continuations of one prompt, by the rules of transformers."""
