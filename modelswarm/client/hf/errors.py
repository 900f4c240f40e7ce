"""Errors of `generate` and of its sessions that are found before anything is sent."""

from __future__ import annotations

from modelswarm.errors import UserError


class ArgumentError(UserError, ValueError):
    """An argument has a wrong value; `field` is its name."""


class UnsupportedArgumentError(UserError, NotImplementedError):
    """An argument of Hugging Face's generate that has no effect on a swarm, and is refused by name."""
