"""The supported model families, one entry each. Adding one: docs/adding-a-model-family.md."""
