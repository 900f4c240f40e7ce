"""Code shared by all three processes: flags, signals, parent watch, run files."""
