"""Failure detection and outlier detection over peers, and probe migrations."""
