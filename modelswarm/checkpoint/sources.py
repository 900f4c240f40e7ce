"""Where a model comes from: an address such as `hf://org/name` becomes a folder on this machine.

Called by the server (for its blocks only), by `modelswarm plan` and by `modelswarm up`. Four kinds of address:
`demo://counting` (ships with the package), `file:///folder` or a plain path, `hf://org/name[@revision]` (downloads
only the shards that the wanted blocks need; HF_ENDPOINT and HF_HOME are huggingface_hub's), and `pvc://claim/path`
(a volume mounted below a known root). Knows nothing of torch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlparse

from modelswarm.checkpoint.facts import read_outline
from modelswarm.checkpoint.hub import SCHEME, HubModel, download, hub_model
from modelswarm.checkpoint.tensor_index import INDEX, SINGLE, shard_names
from modelswarm.checkpoint.tensor_names import canonical
from modelswarm.demo import counting_folder
from modelswarm.errors import ModelSourceError

SCHEMES = "demo://counting, file:///FOLDER (or a path), hf://ORG/NAME[@REVISION], pvc://CLAIM/PATH"
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
"""Everything but weights that a model needs; what gateways may ask servers for."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where models are looked for."""

    pvc_root: Path = Path("/mnt/modelswarm")  # the volume of a claim is mounted at pvc_root / claim
    hub_endpoint: str | None = None  # None: HF_ENDPOINT, else the public hub
    hub_cache: Path | None = None  # None: HF_HOME's


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model folder; it may hold only the shards that were asked for."""

    source: str
    folder: Path
    revision: str  # equal for servers that hold the same model


def resolve(
    source: str, blocks: tuple[int, int] | None = None, places: Places | None = None
) -> Checkpoint:
    """Make the model present, at least what `blocks` (None: all) need; ModelSourceError says what is wrong."""
    places = places or Places()
    if source.startswith(SCHEME):
        return _from_hub(source, blocks, places)
    folder = _local_folder(source, places.pvc_root)
    try:
        if not folder.is_dir():
            raise ModelSourceError("model", f"{source}: {folder} is not a folder")
        return Checkpoint(source, folder, fingerprint(folder))
    except OSError as error:  # no rights, a name too long, a volume that fails
        raise ModelSourceError("model", f"{source} cannot be read: {error.strerror}") from error


def resolve_outline(source: str, places: Places | None = None) -> Path:
    """Only the files of MODEL_FILES and the index: enough for an Outline, no weights are downloaded."""
    places = places or Places()
    if not source.startswith(SCHEME):
        return resolve(source, places=places).folder
    return _download(hub_model(source), [*MODEL_FILES, INDEX], places)


def fingerprint(folder: Path) -> str:
    """A short name for the model's configuration and layout of weights; the weights themselves are not read."""
    digest = hashlib.sha256()
    for name in ("config.json", INDEX):
        if (folder / name).is_file():
            digest.update((folder / name).read_bytes())
    if not (folder / INDEX).is_file() and (folder / SINGLE).is_file():
        with (folder / SINGLE).open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            digest.update(handle.read(min(length, 1 << 24)))
    return digest.hexdigest()[:16]


def _local_folder(source: str, pvc_root: Path) -> Path:
    if "://" not in source:
        return Path(source).expanduser()
    address = urlparse(source)
    path = unquote(address.path)
    if address.scheme == "file" and address.netloc in ("", "localhost"):
        return Path(path)
    if address.scheme == "demo" and address.netloc == "counting" and path in ("", "/"):
        return counting_folder()
    if address.scheme == "pvc" and address.netloc:
        return _inside(pvc_root / address.netloc, path.strip("/"), source)
    raise ModelSourceError("model", f"{source!r} is not a model address; allowed are {SCHEMES}")


def _inside(root: Path, path: str, source: str) -> Path:
    folder = root / path
    if ".." in Path(path).parts:
        raise ModelSourceError("model", f"{source!r} must not leave its volume")
    return folder


def _from_hub(source: str, blocks: tuple[int, int] | None, places: Places) -> Checkpoint:
    model = hub_model(source)
    folder = _download(model, [*MODEL_FILES, INDEX], places)
    pinned = HubModel(model.name, folder.name)  # a branch may move between two downloads
    outline = read_outline(folder)
    part = outline.whole if blocks is None else outline.part(*blocks)
    weight_map = shard_names(folder)
    shards = {
        file
        for stored, file in weight_map.items()
        if (tensor := canonical(stored)) is not None and part.needs(tensor)
    }
    _download(pinned, sorted(shards) if weight_map else [SINGLE], places)
    return Checkpoint(source, folder, folder.name)


def _download(model: HubModel, files: list[str], places: Places) -> Path:
    return download(model, files, places.hub_endpoint, places.hub_cache)
