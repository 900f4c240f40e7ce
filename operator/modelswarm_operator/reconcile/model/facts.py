"""What the operator knows of a swarm's model: from the package, from status, or from an inspection's last words.

Called by `layout` and `inspection`. The model inside the package is read in process (once); everything else only a pod
that sees the weights can read.
"""

from __future__ import annotations

import json
from functools import lru_cache

from modelswarm.checkpoint.facts import ModelFacts
from modelswarm.checkpoint.inspection import facts_document, facts_from_document, inspect_model
from modelswarm.errors import ModelSourceError
from modelswarm.resources.spec import Model
from modelswarm.resources.status import ModelStatus

_IN_PACKAGE = "demo://"
_HUB = "hf://"


def pinned_address(known: ModelStatus) -> str:
    """What servers load: the very commit that was inspected, so that later pods hold the same weights."""
    if not known.source.startswith(_HUB) or not known.revision:
        return known.source
    return f"{known.source.partition('@')[0]}@{known.revision}"


def known_model(model: Model, stored: ModelStatus | None) -> ModelStatus | None:
    """None: an inspection has to find out. UserError: it is known that there is no such model."""
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
    return _status(address, tokenizer, json.dumps(facts_document(found.facts, found.revision)))


def parse_inspection(model: Model, message: str) -> ModelStatus:
    """From what an inspection wrote at its end. ModelSourceError when that is not what it should be."""
    return _status(model.address, model.tokenizer, message)


def _status(address: str, tokenizer: str | None, message: str) -> ModelStatus:
    try:
        document = json.loads(message)
    except (ValueError, RecursionError):  # the latter: brackets in brackets
        document = None
    if not isinstance(document, dict):
        raise ModelSourceError("model", f"the inspection of {address} ended without facts")
    facts_from_document(document)
    given = {"source": address, **({"tokenizer": tokenizer} if tokenizer else {})}
    return ModelStatus.model_validate({**document, **given})


def facts_of(known: ModelStatus) -> ModelFacts:
    return facts_from_document(known.model_dump(by_alias=True))
