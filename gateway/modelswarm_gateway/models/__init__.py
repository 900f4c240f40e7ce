"""Tokenizer, chat template and sampling defaults of each served model."""
