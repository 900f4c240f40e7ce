"""What a model is and weighs, told in one line of JSON: what a planner must know before any server starts.

Run by the operator as a pod beside the weights (`python -m modelswarm.checkpoint.inspection --model hf://org/name
--output /dev/termination-log`), and called in process by `modelswarm plan` and `up`. Reads JSON and headers only, no
weights and no torch; of a hub model it fetches what servers would not need to fetch again. Starts nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal

import click
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from modelswarm.checkpoint.facts import ModelFacts, Outline, read_facts, read_outline, weigh
from modelswarm.checkpoint.hub import SCHEME, HubModel, hub_model, remote_header
from modelswarm.checkpoint.sources import Places, resolve, resolve_outline
from modelswarm.checkpoint.tensor_index import SINGLE, Entry, shard_names
from modelswarm.checkpoint.tensor_names import block_of, canonical
from modelswarm.checkpoint.tokenizer import check_tokenizer
from modelswarm.errors import ModelSourceError, UserError

MOST_BYTES = 4000  # Kubernetes keeps 4096 of a termination message
REFUSED = 2  # exit code: the model cannot be served, and the output says why

_Positive = Annotated[int, Field(ge=1, le=2**53)]  # what any reader of JSON has exactly
_Blocks = Annotated[int, Field(ge=1, le=100_000)]  # planners count block by block


@dataclass(frozen=True, slots=True)
class Inspection:
    facts: ModelFacts
    revision: str  # what the address stands for now: a commit, or a fingerprint


class FactsDocument(BaseModel):
    """`Inspection` as it travels from the pod to the operator."""

    model_config = ConfigDict(
        alias_generator=to_camel, extra="ignore", frozen=True, strict=True, validate_by_name=True
    )

    family: Annotated[str, Field(min_length=1)]
    revision: str
    dtype: Literal["float32", "bfloat16", "float16"]
    blocks: _Blocks
    context: _Positive
    vocab: _Positive
    hidden: _Positive
    block_elements: _Positive
    embedding_elements: _Positive
    kv_elements: _Positive
    tied: bool


def inspect_model(
    source: str,
    tokenizer: str | None = None,
    places: Places | None = None,
    template: Path | None = None,
) -> Inspection:
    """`tokenizer`: the address of one instead of the model's own; `template`: the file of a chat template.

    UserError says what is wrong with any of them.
    """
    places = places or Places()
    if source.startswith(SCHEME):
        folder, facts = _of_hub(source, places)
        revision = folder.name
    else:
        checkpoint = resolve(source, places=places)
        folder, revision = checkpoint.folder, checkpoint.revision
        facts = read_facts(folder)
    if template is not None and find_spec("jinja2"):
        _check_template(template)
    if find_spec("tokenizers"):  # `plan` works where only the library is installed
        words = folder if tokenizer is None else resolve_outline(tokenizer, places)
        check_tokenizer(words, facts.outline.vocab)
    return Inspection(facts, revision)


def facts_document(facts: ModelFacts, revision: str) -> dict[str, Any]:
    """JSON that `facts_from_document` reads."""
    outline = facts.outline
    document = FactsDocument(
        family=outline.family,
        revision=revision,
        dtype=facts.dtype,  # type: ignore[arg-type]  # one of DTYPES; pydantic checks
        blocks=outline.n_blocks,
        context=outline.context,
        vocab=outline.vocab,
        hidden=outline.hidden,
        block_elements=facts.block_elements,
        embedding_elements=facts.embedding_elements,
        kv_elements=facts.kv_elements,
        tied=outline.tied,
    )
    return document.model_dump(by_alias=True)


def facts_from_document(document: Mapping[str, Any]) -> ModelFacts:
    """The reverse; more fields than these are fine. ModelSourceError when it is no such document."""
    try:
        told = FactsDocument.model_validate(dict(document))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        raise ModelSourceError("model", f"not facts of a model: {where}: {first['msg']}") from None
    outline = Outline(
        family=told.family,
        n_blocks=told.blocks,
        hidden=told.hidden,
        vocab=told.vocab,
        context=told.context,
        tied=told.tied,
    )
    return ModelFacts(
        outline, told.dtype, told.block_elements, told.embedding_elements, told.kv_elements
    )


def _check_template(path: Path) -> None:
    from modelswarm.checkpoint.chat_template import check_template

    try:
        check_template(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ModelSourceError("chat_template", f"{path} cannot be read: {error}") from error


def _of_hub(source: str, places: Places) -> tuple[Path, ModelFacts]:
    """Block 0 stands for all: blocks of the served families are alike. The index says whether all are there."""
    folder = resolve_outline(source, places)
    outline = read_outline(folder)
    model = HubModel(hub_model(source).name, folder.name)
    weight_map = shard_names(folder)
    if not weight_map:
        tensors = _headers(model, [SINGLE], places)
        return folder, weigh(outline, outline.whole, tensors, source)
    _check_index(outline, weight_map, source)
    part = outline.part(0, 1)
    files = {
        file
        for name, file in weight_map.items()
        if (known := canonical(name)) and part.needs(known)
    }
    return folder, weigh(outline, part, _headers(model, sorted(files), places), source)


def _check_index(outline: Outline, weight_map: Mapping[str, str], source: str) -> None:
    names = {known for name in weight_map if (known := canonical(name))}
    blocks = {block_of(name) for name in names}
    for block in range(outline.n_blocks):
        if block not in blocks:
            raise ModelSourceError("model", f"{source} has no weights for block {block}")
    for name in sorted(outline.whole.tables - names):
        raise ModelSourceError("model", f"{source} has no weights for {name}")


def _headers(model: HubModel, files: Sequence[str], places: Places) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for file in files:
        for stored, entry in remote_header(model, file, places.hub_endpoint).items():
            if (name := canonical(stored)) is not None:
                found[name] = entry
    return found


@click.command(name="modelswarm.checkpoint.inspection")
@click.option("--model", required=True, help="demo://, file://, hf:// or pvc:// address.")
@click.option("--tokenizer", help="Address of a tokenizer instead of the model's own.")
@click.option("--chat-template", type=click.Path(path_type=Path), help="File of a chat template.")
@click.option("--output", type=click.Path(path_type=Path), help="File that gets the same text.")
def main(
    model: str, tokenizer: str | None, chat_template: Path | None, output: Path | None
) -> None:
    """Say what MODEL is, as JSON; or, with exit code 2, why it cannot be served, as one sentence."""
    try:
        found = inspect_model(model, tokenizer, template=chat_template)
        told, code = json.dumps(facts_document(found.facts, found.revision)), 0
    except UserError as error:
        told, code = _sentence(error, model, tokenizer), REFUSED
    if output is not None:
        output.write_text(told, encoding="utf-8")
    sys.stdout.write(told + "\n")  # always: a pod's log should say it too
    sys.exit(code)


def _sentence(error: UserError, model: str, tokenizer: str | None) -> str:
    """One line that names the address; folders inside a pod mean nothing to the person who wrote it."""
    message = " ".join(error.message.split())
    addresses = model if tokenizer is None else f"{model} with the tokenizer of {tokenizer}"
    if not any(address in message for address in (model, tokenizer) if address):
        message = f"{addresses}: {message}"
    return message.encode()[:MOST_BYTES].decode(errors="ignore")


if __name__ == "__main__":
    main()
