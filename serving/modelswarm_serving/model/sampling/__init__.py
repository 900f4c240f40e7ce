"""The sampler: filters and counter-based noise."""
