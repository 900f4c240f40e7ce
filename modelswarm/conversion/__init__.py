"""Weights of other programs, written as model folders in Hugging Face's format."""
