"""What the operator writes on a server's pod and the gateway reads there: the two never import each other.

The operator's further names are in its own `names`. Labels are selected by, annotations are not. Knows neither.
"""

from __future__ import annotations

DOMAIN = "modelswarm.io"

ROLE = f"{DOMAIN}/role"  # a label
SERVER = "server"  # the role of a pod that sessions may be sent to
INCARNATION = f"{DOMAIN}/incarnation"  # a label
SERVED_NAME = f"{DOMAIN}/served-name"  # an annotation

LINKS = "links"  # the name of the container port for links
LINKS_PORT = 7000
