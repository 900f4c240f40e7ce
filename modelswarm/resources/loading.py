"""Reads a swarm document from a YAML file; one error lists every violation.

Called by the command line. Knows YAML and files; the rules are in `spec` and `rules`, their messages in `violations`.
"""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from modelswarm.errors import DocumentError
from modelswarm.resources.spec import ModelSwarm
from modelswarm.resources.violations import InvalidDocumentError, list_violations

MAX_DOCUMENT_BYTES = 1 << 20


class _Loader(yaml.SafeLoader):
    """YAML without surprises: duplicate keys and aliases are refused, and nesting is bounded."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.constructor.ConstructorError(None, None, "aliases are not allowed", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue  # the safe loader refuses it and names its place
            if key.value in seen:
                problem = f"the key {key.value!r} appears twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def load_document(path: Path | str) -> ModelSwarm:
    """Return the one ModelSwarm in the file. Raises DocumentError, which names the file and every violation."""
    return parse_document(_read(Path(path)), str(path))


def parse_document(text: str, name: str) -> ModelSwarm:
    """As `load_document`, for text; errors call it `name`."""
    document = _parse_only_document(text, name)
    try:
        return ModelSwarm.parse(document)
    except ValidationError as error:
        raise InvalidDocumentError(name, list_violations(error, ModelSwarm)) from None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_DOCUMENT_BYTES + 1)  # its size may be unknown, as a device's
        if len(content) > MAX_DOCUMENT_BYTES:
            raise DocumentError(
                str(path), f"larger than {MAX_DOCUMENT_BYTES} bytes; not a swarm document"
            )
        return content.decode()
    except UnicodeDecodeError as error:
        raise DocumentError(str(path), f"not UTF-8 text (byte {error.start})") from None
    except FileNotFoundError:
        raise DocumentError(str(path), "no such file") from None
    except OSError as error:
        raise DocumentError(str(path), f"cannot be read: {error.strerror}") from None


def _parse_only_document(text: str, name: str) -> Any:
    try:
        documents = [found for found in yaml.load_all(text, _Loader) if found is not None]
    except yaml.YAMLError as error:
        raise DocumentError(name, _describe_yaml_error(error)) from None
    except RecursionError:
        raise DocumentError(name, "nested too deeply; not a swarm document") from None
    if len(documents) != 1:
        raise DocumentError(
            name, f"holds {len(documents)} documents; allowed: exactly one ModelSwarm"
        )
    if not isinstance(documents[0], dict):
        raise DocumentError(name, "not a mapping; a ModelSwarm has fields such as `apiVersion:`")
    return documents[0]


def _describe_yaml_error(error: yaml.YAMLError) -> str:
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f"not YAML: {str(error).splitlines()[0]}"
    mark = error.problem_mark
    return f"line {mark.line + 1}, column {mark.column + 1}: not YAML: {error.problem}"
