"""Metrics, probes and logs of the operator."""
