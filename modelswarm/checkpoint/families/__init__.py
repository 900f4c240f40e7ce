"""The supported model families, one entry each. Adding one: docs/reference/adding-a-model-family.md."""
