"""The Hugging Face hub: downloads files into the local cache, and reads headers of weights without the weights.

Used by `sources.py` (servers, `modelswarm up`) and `inspection.py`. HF_ENDPOINT, HF_HOME and HF_TOKEN belong to
huggingface_hub. Every fault becomes one sentence. Knows names of files, not their content.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from modelswarm.checkpoint.tensor_index import TensorEntry
from modelswarm.errors import ModelSourceError

HUB_SCHEME = "hf://"
PIECE_BYTES = 16 << 20
"""Bytes of a file between two reports while its hash is computed."""
_SHA256 = re.compile("[0-9a-f]{64}")

OnBytes: TypeAlias = Callable[[int, int], None]
"""Told (bytes fetched, all bytes to fetch; 0: not known), from any thread."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """`hf://ORG/NAME[@REVISION]`."""

    name: str
    revision: str | None

    def __str__(self) -> str:
        return f"{HUB_SCHEME}{self.name}" + (f"@{self.revision}" if self.revision else "")


def parse_hub_source(source: str) -> HubModel:
    name, _, revision = source.removeprefix(HUB_SCHEME).partition("@")
    parts = name.strip("/").split("/")
    if len(parts) not in (1, 2) or not all(parts):
        raise ModelSourceError("model", f"{source!r} is not hf://ORG/NAME[@REVISION]")
    if ".." in revision.split("/"):  # the library keeps a file of this name in its cache
        raise ModelSourceError("model", f"{source!r} has a revision with `..`; allowed: none")
    return HubModel("/".join(parts), revision or None)


def pin_source(source: str, revision: str) -> str:
    """Return the address of that commit of a hub's model, whose branch may move later; of others, their address."""
    if not source.startswith(HUB_SCHEME) or not revision:
        return source
    return f"{source.partition('@')[0]}@{revision}"


def download(
    model: HubModel,
    files: Sequence[str],
    endpoint: str | None,
    cache: Path | None,
    on_bytes: OnBytes | None = None,
) -> Path:
    """Download those of `files` that the model has and return their folder; its name is the commit."""
    from huggingface_hub import snapshot_download  # imported here: local models work without it

    with _translated_errors(model, endpoint):
        folder = snapshot_download(
            model.name,
            revision=model.revision,
            allow_patterns=list(files),
            endpoint=endpoint,
            cache_dir=cache,
            tqdm_class=None if on_bytes is None else _progress_class(on_bytes),
        )
    return Path(folder)


def _progress_class(on_bytes: OnBytes) -> Any:
    """Return a class for the library's progress bars that draws nothing and reports bytes.

    The library makes up to two bars of bytes, for the network and for the disk: the one that is ahead counts.
    """
    base: Any = import_module("tqdm.auto").tqdm
    bars: list[Any] = []

    class ByteProgress(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})
            self.n, self.total = options.get("initial") or 0, options.get("total")
            self._counts_bytes = options.get("unit") == "B"
            if self._counts_bytes:
                bars.append(self)

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            self.refresh()

        def refresh(self, *args: Any, **options: Any) -> None:
            if self._counts_bytes:
                done = max(int(bar.n) for bar in bars)
                on_bytes(done, max(done, *(int(bar.total or 0) for bar in bars)))

    return ByteProgress


def checked_files(folder: Path, files: Iterable[str]) -> set[str]:
    """Return those of `files` that an earlier start has downloaded and compared with their hashes."""
    return {
        file for file in files if (folder / file).is_file() and not _marker(folder, file).exists()
    }


def mark_unchecked(model: HubModel, folder: Path, files: Iterable[str]) -> None:
    """Mark files whose download begins: until `check_hashes` has seen them, no start and no process takes them as good.

    A start may end between the download and the comparison.
    """
    try:
        for file in files:
            marker = _marker(folder, file)
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
    except OSError as error:
        raise ModelSourceError("model", f"{model} cannot be downloaded: {error}") from error


def _marker(folder: Path, file: str) -> Path:
    return folder.parents[1] / "unchecked" / folder.name / file


def check_hashes(
    model: HubModel, folder: Path, files: Sequence[str], on_bytes: OnBytes | None = None
) -> None:
    """Compare files with the SHA-256 that the hub stated; delete one that differs, so that the next start fetches it.

    The library names a file in its cache by the hash of the hub. Small files have another kind of hash, which is not
    compared. It takes about 0.7 s of CPU time per GB. `on_bytes`: told the bytes that are compared.
    """
    done = total = 0
    with suppress(OSError):  # another process has deleted a file, which ends the comparison below
        total = sum((folder / file).stat().st_size for file in files)

    def note(count: int) -> None:
        nonlocal done
        done += count
        if on_bytes is not None:
            on_bytes(done, total)

    for file in files:
        path = folder / file
        stated = path.resolve().name
        if _SHA256.fullmatch(stated):
            _check_hash(model, path, stated, note)
        _marker(folder, file).unlink(missing_ok=True)


def _check_hash(model: HubModel, path: Path, stated: str, note: Callable[[int], None]) -> None:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as handle:
            while piece := handle.read(PIECE_BYTES):
                digest.update(piece)
                note(len(piece))
        found = digest.hexdigest()
    except OSError as error:  # another process has deleted it
        detail = f"{path.name} cannot be read: {error.strerror}; start again"
        raise ModelSourceError("model", f"{model}: {detail}") from error
    if found != stated:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        raise ModelSourceError(
            "model",
            f"{model}: {path.name} has the SHA-256 {found}, but the hub states {stated}; it is deleted, start again",
        )


def read_remote_header(model: HubModel, file: str, endpoint: str | None) -> dict[str, TensorEntry]:
    """Read the header of one safetensors file by HTTP ranges, without the weights: stored name -> entry."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RemoteEntryNotFoundError, SafetensorsParsingError

    with _translated_errors(model, endpoint):
        try:
            found = HfApi(endpoint=endpoint).parse_safetensors_file_metadata(
                model.name, file, revision=model.revision
            )
        except RemoteEntryNotFoundError as error:
            detail = f"has no {file} (safetensors weights are needed)"
            raise ModelSourceError("model", f"{model} {detail}") from error
        except SafetensorsParsingError as error:
            raise ModelSourceError("model", f"{model}: {file} is not a safetensors file") from error
    return {
        name: TensorEntry(
            file, name, tensor.dtype, tuple(tensor.shape), _tensor_size(tensor.data_offsets)
        )
        for name, tensor in found.tensors.items()
    }


def _tensor_size(offsets: tuple[int, int]) -> int:
    return offsets[1] - offsets[0]


@contextmanager
def _translated_errors(model: HubModel, endpoint: str | None) -> Iterator[None]:
    """Turn every error of the hub's library into a ModelSourceError."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RemoteEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise ModelSourceError("model", f"{model} is gated: set HF_TOKEN to use it") from error
    except RevisionNotFoundError as error:
        raise ModelSourceError("model", f"{model}: there is no such revision") from error
    except RepositoryNotFoundError as error:
        raise ModelSourceError(
            "model", f"{model}: there is no such model (or no access)"
        ) from error
    except RemoteEntryNotFoundError as error:
        raise ModelSourceError("model", f"{model} lacks a file that it names: {error}") from error
    except HFValidationError as error:
        raise ModelSourceError("model", f"{model} is not a valid name") from error
    except (
        *(LocalEntryNotFoundError, HfHubHTTPError, _http_client().HTTPError, OSError),
        RuntimeError,  # of its transfer library, and of a client that another thread has closed
    ) as error:
        reason = _network_fault(error, endpoint) or f"cannot be downloaded: {error}"
        raise ModelSourceError("model", f"{model} {' '.join(reason.split())}") from error


def _network_fault(error: BaseException, endpoint: str | None) -> str | None:
    """Return the end of the sentence if the network or HF_HUB_OFFLINE is the cause; None for all other errors."""
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    transport_error = _http_client().TransportError
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OfflineModeIsEnabled):
            return (
                "is not in the cache, and HF_HUB_OFFLINE forbids downloads: unset it, "
                "or give the path of a local copy (file:///FOLDER)"
            )
        # The library closes its client for all threads when the network fails in one.
        if isinstance(cause, transport_error) or "client has been closed" in str(cause):
            return (
                f"cannot be downloaded: the network is the cause, {endpoint or constants.ENDPOINT} does not answer "
                f"({cause}); set HF_ENDPOINT to a mirror, set HF_HUB_OFFLINE=1 if the model is in the cache, "
                "or give the path of a local copy (file:///FOLDER)"
            )
        cause = cause.__cause__ or cause.__context__
    return None


def _http_client() -> Any:
    """Return the HTTP library of the hub's library, for its errors: httpx2 from version 2 on."""
    return import_module("httpx2" if find_spec("httpx2") else "httpx")
