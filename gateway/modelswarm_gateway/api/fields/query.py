"""Query parameters of every route: those that its function declares. Any other is refused by name.

A dependency of the whole app, so no route can ignore a parameter.
"""

from __future__ import annotations

from fastapi import Request

from modelswarm_gateway.errors import ApiError, Code, invalid_request, shorten


def check_query(request: Request) -> None:
    """Raise ApiError for a query parameter that the route does not have, or that is given twice."""
    given = [name for name, _ in request.query_params.multi_items()]
    if not given:
        return
    known = [field.alias for field in request.scope["route"].dependant.query_params]
    for name in given:
        if name not in known:
            allowed = f"allowed: {', '.join(known)}" if known else "this route has none"
            shown = shorten(name)
            detail = f"{shown}: unknown query parameter; {allowed}"
            raise ApiError(Code.UNKNOWN_PARAMETER, detail, param=shown)
        if given.count(name) > 1:
            raise invalid_request(name, f"{name}: given {given.count(name)} times; give it once")
