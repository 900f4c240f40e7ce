"""Labels, annotations, container and port of a server's pod: the operator writes them, others read them.

Operator and gateway never import each other. The operator's other names are in its own `names`. Pods are selected by
labels, not by annotations.
"""

from __future__ import annotations

DOMAIN = "modelswarm.io"

ROLE = f"{DOMAIN}/role"  # a label
SERVER = "server"  # the role of a pod that sessions may be sent to
INCARNATION = f"{DOMAIN}/incarnation"  # a label
SERVED_NAME = f"{DOMAIN}/served-name"  # an annotation

CONTAINER = "server"  # the operator's own container in server and inspection pods
LINKS = "links"  # the name of the container port for links
LINKS_PORT = 7000
