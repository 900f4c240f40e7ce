"""Watches, lists and the informer cache of Kubernetes objects."""
