"""Model sources: turns an address such as `hf://org/name` into a folder on this machine.

Called by the server (for its blocks only), by `modelswarm plan` and by `modelswarm up`. Four kinds of address:

- `demo://counting` ships with the package.
- `file:///folder` or a plain path.
- `hf://org/name[@revision]` downloads only the shards that the wanted blocks need. HF_ENDPOINT and HF_HOME are
  huggingface_hub's.
- `pvc://claim/path` is a volume mounted below a known root.

Knows no spans.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

from modelswarm.checkpoint.config.adapter_config import ADAPTER_FILES
from modelswarm.checkpoint.facts import read_config
from modelswarm.checkpoint.hub import (
    HUB_SCHEME,
    HubModel,
    OnBytes,
    check_hashes,
    checked_files,
    download,
    mark_unchecked,
    parse_hub_source,
)
from modelswarm.checkpoint.tensor_index import (
    INDEX_FILE,
    SINGLE_FILE,
    read_samples,
    shard_names,
)
from modelswarm.checkpoint.tensor_names import canonical_name
from modelswarm.demo import counting_folder
from modelswarm.errors import ModelSourceError, UserError

SCHEMES = "demo://counting, file:///FOLDER (or a path), hf://ORG/NAME[@REVISION], pvc://CLAIM/PATH"
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
)
"""All files of a model except its weights; gateways may ask servers for them."""


@dataclass(frozen=True, slots=True)
class SourceLocations:
    """Locations in which addresses are looked up."""

    pvc_root: Path = Path("/mnt/modelswarm")  # the volume of a claim is mounted at pvc_root / claim
    hub_endpoint: str | None = None  # None: HF_ENDPOINT, else the public hub
    hub_cache: Path | None = None  # None: HF_HOME's


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model folder; it may hold only the requested shards."""

    source: str
    folder: Path
    revision: str  # equal for servers that hold the same model


def resolve(
    source: str,
    blocks: tuple[int, int] | None = None,
    locations: SourceLocations | None = None,
    on_bytes: OnBytes | None = None,
) -> Checkpoint:
    """Make the model available, at least the files of `blocks` (None: all); ModelSourceError if that fails.

    `on_bytes`: told the progress of a download.
    """
    locations = locations or SourceLocations()
    if source.startswith(HUB_SCHEME):
        return _resolve_hub(source, blocks, locations, on_bytes)
    folder = _local_folder(source, locations.pvc_root)
    try:
        if not folder.is_dir():
            raise ModelSourceError("model", f"{source}: {folder} is not a folder")
        return Checkpoint(source, folder, fingerprint(folder))
    except OSError as error:  # no permission, a name too long, a failing volume
        raise ModelSourceError("model", f"{source} cannot be read: {error.strerror}") from error


def resolve_adapter(source: str, locations: SourceLocations | None = None) -> Path:
    """Return the folder of a LoRA adapter; UserError if there is none. Addresses are those of models."""
    locations = locations or SourceLocations()
    try:
        if source.startswith(HUB_SCHEME):
            return _download(parse_hub_source(source), list(ADAPTER_FILES), locations)
        folder = _local_folder(source, locations.pvc_root)
        if not folder.is_dir():
            raise ModelSourceError("adapters", f"{source}: {folder} is not a folder")
        return folder
    except ModelSourceError as error:
        raise UserError("adapters", error.message) from error


def resolve_config_files(source: str, locations: SourceLocations | None = None) -> Path:
    """Return a folder with the MODEL_FILES and the index: enough for a ModelConfig, without weights."""
    locations = locations or SourceLocations()
    if not source.startswith(HUB_SCHEME):
        return resolve(source, locations=locations).folder
    return _download(parse_hub_source(source), [*MODEL_FILES, INDEX_FILE], locations)


def fingerprint(folder: Path) -> str:
    """Return a hash of the configuration, the layout of the weights, and a sample of each tensor.

    Servers of one route must have equal ones, so a folder whose shards were replaced never joins one that has the old
    ones. A folder without some of the shards has another fingerprint than a whole one.
    """
    digest = hashlib.sha256()
    for name in ("config.json", INDEX_FILE):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    for file in sorted(set(shard_names(folder).values())) or [SINGLE_FILE]:
        if (folder / file).is_file():
            for part in read_samples(folder / file):
                digest.update(part)
    return digest.hexdigest()[:16]


def _local_folder(source: str, pvc_root: Path) -> Path:
    if "://" not in source:
        return Path(os.path.expanduser(source))  # pathlib fails for the home of an unknown user
    address = urlparse(source)
    path = unquote(address.path)
    if address.scheme == "file" and address.netloc in ("", "localhost"):
        return Path(path)
    if address.scheme == "demo" and address.netloc == "counting" and path in ("", "/"):
        return counting_folder()
    if address.scheme == "pvc" and address.netloc:
        return _folder_inside(pvc_root / address.netloc, path.strip("/"), source)
    raise ModelSourceError("model", f"{source!r} is not a model address; allowed are {SCHEMES}")


def _folder_inside(root: Path, path: str, source: str) -> Path:
    folder = root / path
    if ".." in Path(path).parts:
        raise ModelSourceError("model", f"{source!r} must not leave its volume")
    return folder


def _resolve_hub(
    source: str,
    blocks: tuple[int, int] | None,
    locations: SourceLocations,
    on_bytes: OnBytes | None,
) -> Checkpoint:
    model = parse_hub_source(source)
    if on_bytes is not None:
        on_bytes(0, 0)
    folder = _download(model, [*MODEL_FILES, INDEX_FILE], locations)
    pinned = HubModel(model.name, folder.name)  # a branch may move between two downloads
    config = read_config(folder)
    part = config.all_blocks if blocks is None else config.part(*blocks)
    weight_map = shard_names(folder)
    shards = {
        file
        for stored, file in weight_map.items()
        if (tensor := canonical_name(stored)) is not None and part.needs_tensor(tensor)
    }
    files = sorted(shards) if weight_map else [SINGLE_FILE]
    known = checked_files(folder, files)
    new = [file for file in files if file not in known]
    mark_unchecked(pinned, folder, new)
    _download(pinned, files, locations, on_bytes)
    check_hashes(pinned, folder, [file for file in new if (folder / file).is_file()], on_bytes)
    return Checkpoint(source, folder, folder.name)


def _download(
    model: HubModel, files: list[str], locations: SourceLocations, on_bytes: OnBytes | None = None
) -> Path:
    return download(model, files, locations.hub_endpoint, locations.hub_cache, on_bytes)
