"""The output of a turn: its text, stop strings, log probabilities and chunks."""
