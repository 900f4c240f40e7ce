"""State of each server: health, step times, blocks, drain causes, link failures, variant."""
