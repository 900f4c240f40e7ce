"""Model files offered to gateways, in chunks (`ModelFileRequest`).

Used by `node.py`. Only names of `MODEL_FILES` exist: no paths, no weights. A tokenizer or chat template that the user
chose replaces the model's own, and gateways see no difference. Knows no connections.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from modelswarm.checkpoint.sources import MODEL_FILES, resolve_config_files
from modelswarm.errors import ModelSourceError, UserError
from modelswarm.protocol.messages import ModelFileChunk

ALLOWED = frozenset({*MODEL_FILES, "added_tokens.json"})
TEMPLATE = "chat_template.jinja"
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"
TOKENIZER_FILES = frozenset(
    {
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
        *("added_tokens.json", TEMPLATE, TOOL_TEMPLATE),
    }
)
CHUNK_BYTES = 256 << 10
MAX_FILE_BYTES = 256 << 20  # per file; the largest tokenizers have 40 MB
MAX_TEMPLATE_BYTES = 1 << 20


class ModelFiles:
    """Files of one model. `tokenizer`: folder that replaces all TOKENIZER_FILES; `template`: replaces all templates."""

    def __init__(
        self, folder: Path | None, tokenizer: Path | None = None, template: bytes | None = None
    ) -> None:
        self._folder, self._tokenizer, self._template = folder, tokenizer, template

    @property
    def tokenizer_folder(self) -> Path | None:
        """The folder of the tokenizer."""
        return self._tokenizer or self._folder

    @property
    def revision_suffix(self) -> str:
        """Suffix of the revision, "" without replacements: servers with other files serve another model."""
        if self._tokenizer is None and self._template is None:
            return ""
        digest = hashlib.sha256()
        for name in sorted(TOKENIZER_FILES):
            content = self.read_file(name)
            digest.update(f"{name} {-1 if content is None else len(content)} ".encode())
            digest.update(content or b"")
        return f"+{digest.hexdigest()[:12]}"

    def read_file(self, name: str) -> bytes | None:
        """Return the content; None if the file is missing or not for gateways. Reads the disk: call it in a thread."""
        if name in (TEMPLATE, TOOL_TEMPLATE) and self._template is not None:
            return self._template if name == TEMPLATE else None
        folder = self.tokenizer_folder if name in TOKENIZER_FILES else self._folder
        if folder is None or name not in ALLOWED:
            return None
        path = folder / name
        try:
            if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
                return None
            return path.read_bytes()
        except OSError:
            return None


def open_model_files(
    folder: Path | None, tokenizer: str | None, template: Path | None
) -> ModelFiles:
    """Return the files of a model. `tokenizer`: an address; `template`: a file. UserError if one cannot be read."""
    tokenizer_folder = None
    if tokenizer is not None:
        try:
            tokenizer_folder = resolve_config_files(tokenizer)
        except ModelSourceError as error:
            raise UserError("--tokenizer", error.message) from error
    return ModelFiles(
        folder, tokenizer_folder, None if template is None else _read_template(template)
    )


def _read_template(path: Path) -> bytes:
    try:
        if path.stat().st_size > MAX_TEMPLATE_BYTES:
            raise UserError("--chat-template", f"{path} is larger than {MAX_TEMPLATE_BYTES} bytes")
        content = path.read_bytes()
        _check_template(content.decode())
    except OSError as error:
        raise UserError("--chat-template", f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError("--chat-template", f"{path} is not UTF-8 text") from error
    except ModelSourceError as error:
        raise UserError("--chat-template", error.message) from error
    return content


def _check_template(template: str) -> None:
    if find_spec("jinja2"):  # Jinja comes with torch; the hash model runs without it
        from modelswarm.checkpoint.chat_template import check_template

        check_template(template)


def file_chunks(name: str, content: bytes | None) -> Iterator[ModelFileChunk]:
    """Yield at least one chunk; an empty file gives one without data."""
    if content is None:
        yield ModelFileChunk(name, 0, 0, b"", missing=True)
        return
    for offset in range(0, max(len(content), 1), CHUNK_BYTES):
        yield ModelFileChunk(name, offset, len(content), content[offset : offset + CHUNK_BYTES])
