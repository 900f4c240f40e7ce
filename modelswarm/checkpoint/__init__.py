"""Where a model's files come from and what they say, read without torch (JSON and safetensors headers only)."""
