"""Sources and facts of checkpoints, read without torch (JSON and safetensors headers only)."""
