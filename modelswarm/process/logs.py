"""The log of a server or a gateway: lines on stderr with the process's name."""

from __future__ import annotations

import logging
import sys

# They log each request with its whole URL: signatures of downloads, names of sessions.
_HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "uvicorn")


def start_log(name: str) -> None:
    """Log to stderr from INFO on, libraries for HTTP from WARNING on. `name`: of this process, in each line."""
    logging.basicConfig(
        level=logging.INFO,
        format=f"%(asctime)s {name} %(levelname)s %(message)s",
        stream=sys.stderr,
    )
    for library in _HTTP_LIBRARIES:
        logging.getLogger(library).setLevel(logging.WARNING)
