"""Manifests of pods and owned objects."""
