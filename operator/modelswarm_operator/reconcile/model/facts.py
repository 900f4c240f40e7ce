"""Facts about a swarm's model: from the package, from status, or from the result of an inspection.

Called by `span_plan` and `inspection`. A model inside the package is read in this process (once); any other needs a pod
that sees the weights. Knows no pod.
"""

from __future__ import annotations

import json
from functools import lru_cache

from modelswarm.checkpoint.facts import ModelFacts
from modelswarm.checkpoint.hub import HUB_SCHEME, pin_source
from modelswarm.checkpoint.inspection import facts_document, facts_from_document, inspect_model
from modelswarm.errors import ModelSourceError
from modelswarm.resources.spec import Model
from modelswarm.resources.status import ModelStatus

_IN_PACKAGE = "demo://"


def pinned_address(known: ModelStatus) -> str:
    """Return the address that servers load: the commit that was inspected, so that later pods have the same weights."""
    return pin_source(known.source, known.revision)


def known_model(model: Model, stored: ModelStatus | None) -> ModelStatus | None:
    """Return the facts, or None if an inspection is needed. Raises UserError if there is no such model."""
    address = model.address
    wanted = (address, model.tokenizer)
    if stored is not None and stored.blocks > 0 and (stored.source, stored.tokenizer) == wanted:
        return stored
    if address.startswith(_IN_PACKAGE) and (model.tokenizer or _IN_PACKAGE).startswith(_IN_PACKAGE):
        return _from_package(address, model.tokenizer)
    return None


@lru_cache(maxsize=16)
def _from_package(address: str, tokenizer: str | None) -> ModelStatus:
    found = inspect_model(address, tokenizer)
    document = facts_document(found.facts, found.revision, found.file_bytes, found.warnings)
    return _status(address, tokenizer, json.dumps(document))


def parse_inspection(model: Model, message: str) -> ModelStatus:
    """Parse the termination message of an inspection. Raises ModelSourceError if it holds no facts."""
    return _status(model.address, model.tokenizer, message)


def _status(address: str, tokenizer: str | None, message: str) -> ModelStatus:
    try:
        document = json.loads(message)
    except (ValueError, RecursionError):  # RecursionError: deeply nested brackets
        document = None
    if not isinstance(document, dict):
        raise ModelSourceError("model", f"the inspection of {address} ended without facts")
    facts_from_document(document)
    given = {"source": address, **({"tokenizer": tokenizer} if tokenizer else {})}
    return ModelStatus.model_validate({**document, **given})


def is_from_hub(source: str) -> bool:
    """Return True if servers download the files of this address."""
    return source.startswith(HUB_SCHEME)


def facts_of(known: ModelStatus) -> ModelFacts:
    return facts_from_document(known.model_dump(by_alias=True))
