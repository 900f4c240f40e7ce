"""The Hugging Face hub: files into the local cache, and headers of weights without the weights.

Used by `sources` (servers, `modelswarm up`) and `inspect`. HF_ENDPOINT, HF_HOME and HF_TOKEN are huggingface_hub's own.
Everything that can go wrong there becomes one sentence. Knows names of files, not what is in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from modelswarm.checkpoint.tensor_index import Entry
from modelswarm.errors import ModelSourceError

SCHEME = "hf://"


@dataclass(frozen=True, slots=True)
class HubModel:
    """`hf://ORG/NAME[@REVISION]`."""

    name: str
    revision: str | None

    def __str__(self) -> str:
        return f"{SCHEME}{self.name}" + (f"@{self.revision}" if self.revision else "")


def hub_model(source: str) -> HubModel:
    name, _, revision = source.removeprefix(SCHEME).partition("@")
    parts = name.strip("/").split("/")
    if len(parts) not in (1, 2) or not all(parts):
        raise ModelSourceError("model", f"{source!r} is not hf://ORG/NAME[@REVISION]")
    return HubModel("/".join(parts), revision or None)


def download(
    model: HubModel, files: Sequence[str], endpoint: str | None, cache: Path | None
) -> Path:
    """The folder that now holds those of `files` that the model has; its name is the commit."""
    from huggingface_hub import snapshot_download  # here: only local models must work without it

    with _explained(model):
        folder = snapshot_download(
            model.name,
            revision=model.revision,
            allow_patterns=list(files),
            endpoint=endpoint,
            cache_dir=cache,
        )
    return Path(folder)


def remote_header(model: HubModel, file: str, endpoint: str | None) -> dict[str, Entry]:
    """All tensors of one safetensors file by stored name, read by HTTP ranges: no weights are fetched."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import SafetensorsParsingError

    with _explained(model):
        try:
            found = HfApi(endpoint=endpoint).parse_safetensors_file_metadata(
                model.name, file, revision=model.revision
            )
        except SafetensorsParsingError as error:
            raise ModelSourceError("model", f"{model}: {file} is not a safetensors file") from error
    return {
        name: Entry(file, name, tensor.dtype, tuple(tensor.shape), _size(tensor.data_offsets))
        for name, tensor in found.tensors.items()
    }


def _size(offsets: tuple[int, int]) -> int:
    return offsets[1] - offsets[0]


@contextmanager
def _explained(model: HubModel) -> Iterator[None]:
    """Turns what the hub's library raises into a ModelSourceError."""
    import httpx
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
    except (LocalEntryNotFoundError, HfHubHTTPError, httpx.HTTPError, OSError) as error:
        raise ModelSourceError("model", f"{model} cannot be downloaded: {error}") from error
