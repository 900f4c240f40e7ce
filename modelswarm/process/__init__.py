"""What all three processes share: flags, signals, parent watch, run files."""
