"""Checks of the texts in a peer's Hello, before they become keys, log lines and labels.

Used by the handshake for both directions. The servers' settings refuse the same values at start.
"""

from __future__ import annotations

import re

from modelswarm.protocol.messages import Hello

# Name, incarnation and boot nonce of a peer.
PEER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}/[0-9]{1,20}/[0-9A-Za-z]{1,32}")
# Served name of a model; empty for a gateway.
MODEL = re.compile(r"([A-Za-z0-9][A-Za-z0-9._/:@-]{0,127})?")
# Failure domain: the value of a Kubernetes label.
ZONE = re.compile(r"[A-Za-z0-9._-]{0,63}")
# Most gateways that a Hello may say it replaces.
MAX_REPLACED = 64
# Most adapters of a server.
MAX_ADAPTERS = 256

_TEXTS = {
    "model": MODEL,
    "zone": ZONE,
    "link": re.compile(r"[!-~]{0,64}"),
    "target": re.compile(r"[!-~]{0,512}"),
    "revision": re.compile(r"[^\x00-\x1f\x7f]{0,256}"),
    "grammar": re.compile(r"([a-z]{1,32} [A-Za-z0-9_.+-]{1,32})?"),
    "dtype": re.compile(r"[A-Za-z0-9_.]{0,32}"),
    "numerics": re.compile(r"[A-Za-z0-9_.+=/-]{0,256}"),
}


def hello_fault(hello: Hello) -> str:
    """Return the field of the Hello that has a value it may not have; empty if there is none."""
    if not PEER.fullmatch(hello.peer):
        return "peer"
    for name, pattern in _TEXTS.items():
        if not pattern.fullmatch(getattr(hello, name)):
            return name
    if len(hello.replaces) > MAX_REPLACED or not all(map(PEER.fullmatch, hello.replaces)):
        return "replaces"
    return "" if _has_valid_adapters(hello) else "adapters"


def _has_valid_adapters(hello: Hello) -> bool:
    """Return whether clients can tell the adapters apart, from each other and from the model."""
    names = [hello.model, *(adapter.name for adapter in hello.adapters)]
    return (
        len(names) <= 1 + MAX_ADAPTERS
        and len(set(names)) == len(names)
        and (len(names) == 1 or all(names))
        and all(MODEL.fullmatch(name) for name in names)
        and all(_TEXTS["revision"].fullmatch(adapter.revision) for adapter in hello.adapters)
    )
