"""Lists the input items of a stored response, page by page, as OpenAI does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from modelswarm_gateway.api.responses.response_ids import ResponseId
from modelswarm_gateway.api.responses.stored_responses import StoredResponse
from modelswarm_gateway.errors import ApiError, Code, invalid_field, shorten

MAX_LIMIT = 100  # items of a page
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


@dataclass(frozen=True, slots=True)
class Page:
    """The query parameters of one page."""

    after: str | None  # id of the last item of the page before
    limit: int
    is_ascending: bool


def read_page(after: str | None, limit: str, order: str) -> Page:
    """Return the page that a client asks for. Raise ApiError."""
    if not (limit.isdecimal() and len(limit) <= 3 and 1 <= int(limit) <= MAX_LIMIT):
        detail = f"must be a whole number from 1 to {MAX_LIMIT}, not {shorten(limit)!r}"
        raise invalid_field("limit", detail)
    if order not in ("asc", "desc"):
        raise invalid_field("order", f"must be asc or desc, not {shorten(order)!r}")
    return Page(after, int(limit), order == "asc")


def list_items(response: StoredResponse, wanted: Page) -> dict[str, Any]:
    """Return one page. Raise ApiError if the items are not known, or `after` names none of them."""
    if response.inputs is None:
        detail = (
            "the gateway that had the beginning of this conversation was lost, and its items with it; "
            "the conversation itself can go on"
        )
        raise ApiError(Code.NOT_FOUND, f"response_id: {detail}", param="response_id")
    items = [_complete(response.id, place, item) for place, item in enumerate(response.inputs)]
    if not wanted.is_ascending:
        items.reverse()
    after = wanted.after
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            detail = f"{shorten(after)!r} is not the id of an input item of this response"
            raise invalid_field("after", detail)
        items = items[places[0] + 1 :]
    page = items[: wanted.limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > len(page),
    }


def _complete(response_id: ResponseId, place: int, item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item with the fields that a client need not write: its type, an id, parts of content."""
    kind = item.get("type", "message")
    made = {"type": kind, "status": "completed", **item}
    made["id"] = item.get("id") or response_id.item_id(_PREFIXES[kind], -1 - place)
    if kind == "message" and isinstance(item["content"], str):
        is_answer = item["role"] == "assistant"
        part: dict[str, Any] = {"type": "output_text" if is_answer else "input_text"}
        part["text"] = item["content"]
        made["content"] = [part | ({"annotations": []} if is_answer else {})]
    return made
