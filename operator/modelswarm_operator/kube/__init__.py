"""Kinds, leader election, access review and Events. The client is `modelswarm.kube`."""
