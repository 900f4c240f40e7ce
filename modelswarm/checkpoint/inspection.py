"""Inspects a model: its configuration and sizes as one line of JSON, for planning before any server starts.

Run by the operator as a pod beside the weights: `python -m modelswarm.checkpoint.inspection --model hf://org/name
--output /dev/termination-log`. Called in process by `modelswarm plan` and `up`. Reads JSON and headers only, no
weights and no torch. Files of a hub model go into the cache, so that servers need not fetch them again. Starts nothing.
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

from modelswarm.checkpoint.block_tensors import TensorPlan, check_block_count
from modelswarm.checkpoint.facts import (
    CONFIG_FILE,
    ModelConfig,
    ModelFacts,
    facts_from_tensors,
    read_config_and_plan,
    read_facts,
)
from modelswarm.checkpoint.generation_config import generation_warnings
from modelswarm.checkpoint.hub import HUB_SCHEME, HubModel, parse_hub_source, read_remote_header
from modelswarm.checkpoint.sources import SourceLocations, resolve, resolve_config_files
from modelswarm.checkpoint.tensor_index import (
    SINGLE_FILE,
    TensorEntry,
    read_header,
    shard_names,
    stated_bytes,
)
from modelswarm.checkpoint.tensor_names import MAX_BLOCKS, block_of, canonical_name
from modelswarm.checkpoint.tokenizer import check_tokenizer
from modelswarm.demo import counting_folder
from modelswarm.errors import ModelSourceError, UserError

MAX_OUTPUT_BYTES = 4000
"""Kubernetes keeps 4096 bytes of a termination message."""
MAX_WARNING_LENGTH = 700
"""Characters of a warning in the output; each takes up to four of its bytes."""
REFUSED = 2
"""Exit code of a model that cannot be served; the output is the reason."""

_Positive = Annotated[
    int, Field(ge=1, le=2**53)
]  # the integers that every JSON reader represents exactly
_Blocks = Annotated[int, Field(ge=1, le=MAX_BLOCKS)]
_Block = Annotated[int, Field(ge=0, lt=MAX_BLOCKS)]


@dataclass(frozen=True, slots=True)
class Inspection:
    facts: ModelFacts
    revision: str  # present revision of the address: a commit, or a fingerprint
    tokenizer_folder: Path
    warnings: tuple[str, ...] = ()  # sentences about what will not work, such as chats
    file_bytes: int = 0  # of all weight files


class FactsDocument(BaseModel):
    """`Inspection` as the pod sends it to the operator."""

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
    smaller_elements: Annotated[int, Field(ge=0, le=2**53)] = 0
    smaller_blocks: Annotated[tuple[_Block, ...], Field(strict=False, max_length=MAX_BLOCKS)] = ()
    tied: bool
    file_bytes: Annotated[int, Field(ge=0, le=2**53)] = 0
    warnings: Annotated[tuple[str, ...], Field(strict=False, max_length=8)] = ()  # JSON has lists


def inspect_model(
    source: str,
    tokenizer: str | None = None,
    locations: SourceLocations | None = None,
    template: Path | None = None,
) -> Inspection:
    """Inspect a model. UserError if the model, tokenizer or template cannot be used.

    `tokenizer`: address of a tokenizer that replaces the model's; `template`: file of a chat template.
    """
    locations = locations or SourceLocations()
    if source.startswith(HUB_SCHEME):
        folder, facts = _inspect_hub(source, locations)
        revision = folder.name
    else:
        checkpoint = resolve(source, locations=locations)
        folder, revision = checkpoint.folder, checkpoint.revision
        facts = read_facts(folder)
    if template is not None and find_spec("jinja2"):
        _check_template(template)
    if folder == counting_folder() and tokenizer is None:
        return Inspection(facts, revision, folder)  # tests check the files of the package
    tokenizer_folder = folder if tokenizer is None else resolve_config_files(tokenizer, locations)
    if find_spec("tokenizers"):  # `plan` works where only the library is installed
        check_tokenizer(tokenizer_folder, facts.config.vocab)
    whole = facts.weight_bytes(0, facts.config.n_blocks, facts.dtype)
    size = max(
        stated_bytes(folder), whole
    )  # the files may have other parts, such as a vision tower
    warnings = (*template_faults(tokenizer_folder), *generation_warnings(folder))
    return Inspection(facts, revision, tokenizer_folder, warnings, size)


def template_faults(tokenizer_folder: Path) -> tuple[str, ...]:
    """Return the sentence about a chat template that does not compile; none if jinja2 is not installed."""
    if not find_spec("jinja2"):
        return ()
    from modelswarm.checkpoint.chat_template import template_fault

    fault = template_fault(tokenizer_folder)
    return () if fault is None else (fault,)


def facts_document(
    facts: ModelFacts, revision: str, file_bytes: int = 0, warnings: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the facts as JSON for `facts_from_document`; warnings and smaller blocks only if there are any."""
    config = facts.config
    document = FactsDocument(
        family=config.family,
        revision=revision,
        dtype=facts.dtype,  # type: ignore[arg-type]  # one of DTYPES; pydantic checks
        blocks=config.n_blocks,
        context=config.context,
        vocab=config.vocab,
        hidden=config.hidden,
        block_elements=facts.block_elements,
        embedding_elements=facts.embedding_elements,
        kv_elements=facts.kv_elements,
        smaller_elements=facts.smaller_elements,
        smaller_blocks=facts.smaller_blocks,
        tied=config.tied,
        file_bytes=file_bytes,
        warnings=tuple(warnings),
    )
    left_out = set() if warnings else {"warnings"}
    if not facts.smaller_blocks:
        left_out |= {"smaller_elements", "smaller_blocks"}
    return document.model_dump(mode="json", by_alias=True, exclude=left_out)


def facts_from_document(document: Mapping[str, Any]) -> ModelFacts:
    """Read the facts from JSON; unknown fields are ignored. ModelSourceError if the document is not valid."""
    try:
        fields = FactsDocument.model_validate(dict(document))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        raise ModelSourceError("model", f"not facts of a model: {where}: {first['msg']}") from None
    config = ModelConfig(
        family=fields.family,
        n_blocks=fields.blocks,
        hidden=fields.hidden,
        vocab=fields.vocab,
        context=fields.context,
        tied=fields.tied,
    )
    return ModelFacts(
        config,
        fields.dtype,
        fields.block_elements,
        fields.embedding_elements,
        fields.kv_elements,
        fields.smaller_elements,
        fields.smaller_blocks,
    )


def _check_template(path: Path) -> None:
    from modelswarm.checkpoint.chat_template import check_template

    try:
        check_template(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ModelSourceError("chat_template", f"{path} cannot be read: {error}") from error


def _inspect_hub(source: str, locations: SourceLocations) -> tuple[Path, ModelFacts]:
    """Read the header of block 0 only, as blocks of one kind are alike. The index shows what the others lack."""
    folder = resolve_config_files(source, locations)
    config, plan = read_config_and_plan(folder)
    model = HubModel(parse_hub_source(source).name, folder.name)
    weight_map = shard_names(folder)
    if not weight_map:
        tensors = _read_headers(model, folder, [SINGLE_FILE], locations)
        check_block_count(config.n_blocks, tensors, folder / CONFIG_FILE, plan.spare_blocks)
        return folder, facts_from_tensors(config, plan, config.all_blocks, tensors, source)
    _check_index(config, plan, weight_map, source, folder)
    part = config.part(0, 1)
    files = {
        file
        for name, file in weight_map.items()
        if (known := canonical_name(name)) and part.needs_tensor(known)
    }
    tensors = _read_headers(model, folder, sorted(files), locations)
    return folder, facts_from_tensors(config, plan, part, tensors, source)


def _check_index(
    config: ModelConfig,
    plan: TensorPlan,
    weight_map: Mapping[str, str],
    source: str,
    folder: Path,
) -> None:
    names = {known for name in weight_map if (known := canonical_name(name))}
    check_block_count(config.n_blocks, names, folder / CONFIG_FILE, plan.spare_blocks)
    blocks = {block_of(name) for name in names}
    for block in range(config.n_blocks):
        if block not in blocks:
            raise ModelSourceError("model", f"{source} has no weights for block {block}")
    for name in plan.names_of(config.all_blocks):
        if name not in names:
            raise ModelSourceError("model", f"{source} has no weights for {name}")


def _read_headers(
    model: HubModel, folder: Path, files: Sequence[str], locations: SourceLocations
) -> dict[str, TensorEntry]:
    """Read the headers of files in the cache, as after an earlier start, and of all others by HTTP."""
    found: dict[str, TensorEntry] = {}
    for file in files:
        if (folder / file).is_file():
            header = read_header(folder, file)
        else:
            header = read_remote_header(model, file, locations.hub_endpoint)
        for stored, entry in header.items():
            if (name := canonical_name(stored)) is not None:
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
    """Print the facts of MODEL as JSON; or, with exit code 2, the reason why it cannot be served as one sentence."""
    try:
        found = inspect_model(model, tokenizer, template=chat_template)
        warnings = [_shown_warning(each, found, tokenizer or model) for each in found.warnings]
        document = facts_document(found.facts, found.revision, found.file_bytes, warnings)
        text, code = _json_line(document), 0
    except UserError as error:
        text, code = _error_sentence(error, model, tokenizer), REFUSED
    if output is not None:
        output.write_text(text, encoding="utf-8")
    sys.stdout.write(text + "\n")  # always: the pod's log shall have it too
    sys.exit(code)


def _json_line(document: Mapping[str, Any]) -> str:
    return json.dumps(document, ensure_ascii=False).encode(errors="replace").decode()


def _shown_warning(warning: str, found: Inspection, address: str) -> str:
    """Return the warning with the address in place of the folder, in at most `MAX_WARNING_LENGTH` characters."""
    return warning.replace(str(found.tokenizer_folder), address)[:MAX_WARNING_LENGTH]


def _error_sentence(error: UserError, model: str, tokenizer: str | None) -> str:
    """Return one line that names the address, since folders inside a pod mean nothing to the user."""
    message = " ".join(error.message.split())
    addresses = model if tokenizer is None else f"{model} with the tokenizer of {tokenizer}"
    if not any(address in message for address in (model, tokenizer) if address):
        message = f"{addresses}: {message}"
    return message.encode()[:MAX_OUTPUT_BYTES].decode(errors="ignore")


if __name__ == "__main__":
    main()
