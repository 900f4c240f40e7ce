"""The served models in Anthropic's shape, for requests to `/v1/models` with Anthropic's header of the version."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from modelswarm_gateway.backend.model_card import ModelCard


def model_info(card: ModelCard) -> dict[str, Any]:
    return {
        "type": "model",
        "id": card.name,
        "display_name": card.name,
        "created_at": datetime.fromtimestamp(card.known_since, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": card.max_length or None,
        "max_tokens": card.max_length or None,
    }


def model_page(cards: Sequence[ModelCard]) -> dict[str, Any]:
    """Return all models as the one page of a list."""
    names = [card.name for card in cards]
    return {
        "data": [model_info(card) for card in cards],
        "has_more": False,
        "first_id": names[0] if names else None,
        "last_id": names[-1] if names else None,
    }
