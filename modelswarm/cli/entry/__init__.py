"""Parts of the entry point: standard streams before a command, errors after it."""
