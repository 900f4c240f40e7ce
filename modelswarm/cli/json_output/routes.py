"""The JSON of `routes`: the cost of each server, and the reason of each route."""

from __future__ import annotations

from modelswarm.cli.json_output.printing import print_json
from modelswarm.client.message_fields import message_fields
from modelswarm.client.swarm import SwarmClient


def print_routes(target: str, model: str) -> None:
    """Print the costs and routes of the gateway at `target` as one line of JSON."""
    with SwarmClient(target) as client:
        print_json(message_fields(client.explain_routes(model)))
