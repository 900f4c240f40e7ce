"""Kubernetes resources, leader election, access review, Events."""
