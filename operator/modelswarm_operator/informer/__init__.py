"""Watches, lists and the cache of Kubernetes objects."""
