"""Terminal output: tables, wrapping, signals."""
