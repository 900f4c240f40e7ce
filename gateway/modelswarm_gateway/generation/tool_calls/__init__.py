"""Tool calls and reasoning in a model's text: one parser per family of chat formats."""
