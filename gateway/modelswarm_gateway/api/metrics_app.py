"""The page that Prometheus reads, on its own port."""

from __future__ import annotations

from typing import cast

from prometheus_client import CollectorRegistry, make_asgi_app
from starlette.types import ASGIApp


def metrics_app(registry: CollectorRegistry) -> ASGIApp:
    return cast("ASGIApp", make_asgi_app(registry))
