"""LoRA adapters: their weights, and what they add to the rows of a step."""
