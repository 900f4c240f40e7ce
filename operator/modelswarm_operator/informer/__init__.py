"""Watches and the informer cache of Kubernetes objects."""
