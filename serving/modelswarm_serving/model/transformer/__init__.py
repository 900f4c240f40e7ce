"""A span of transformer blocks, loaded from a Hugging Face checkpoint."""
