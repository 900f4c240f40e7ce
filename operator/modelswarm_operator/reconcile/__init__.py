"""The operator's decisions, pure: observed state in, actions out."""
