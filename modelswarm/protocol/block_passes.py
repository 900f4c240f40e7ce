"""The call for passes through blocks (`BlockPass` of api.proto): its method between gateway and server, and its limits.

A client, a gateway and a server keep to them. The call is outside of links.
"""

from __future__ import annotations

PASS_METHOD = "/modelswarm.link.v1.Blocks/Pass"  # from a gateway to a server
MESSAGE_BYTES = 1 << 20  # of input or result in one message
MAX_SEQUENCES = 4096  # of one pass
