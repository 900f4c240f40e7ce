"""Rows and tokens in and out, under flow control."""
