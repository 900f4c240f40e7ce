"""Model addresses resolve to folders, or to one line that says what is wrong."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from safetensors import safe_open
from support.models.hub_server import COMMIT, Hub, serve
from support.models.tiny_models import make_model

from modelswarm.checkpoint.facts import read_facts
from modelswarm.checkpoint.sources import (
    MODEL_FILES,
    SourceLocations,
    fingerprint,
    resolve,
    resolve_config_files,
)
from modelswarm.demo import counting_folder
from modelswarm.errors import ModelSourceError, UserError
from modelswarm.local.private_swarm import known_address
from modelswarm.resources.rules import ADDRESS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    with serve("acme/tiny", folder) as running:
        yield running


@pytest.fixture
def locations(hub: Hub, tmp_path: Path) -> SourceLocations:
    return SourceLocations(pvc_root=tmp_path, hub_endpoint=hub.url, hub_cache=tmp_path / "cache")


def list_shards(folder: Path, *patterns: str) -> set[str]:
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    return {file for name, file in index.items() if any(pattern in name for pattern in patterns)}


def list_fetched_shards(hub: Hub) -> set[str]:
    return {name for name in hub.fetched if name.endswith(".safetensors")}


def test_only_shards_of_the_requested_blocks_are_downloaded(
    hub: Hub, locations: SourceLocations, folder: Path
) -> None:
    found = resolve("hf://acme/tiny", (1, 2), locations)
    assert found.revision == COMMIT
    assert list_fetched_shards(hub) == list_shards(folder, "layers.1.")
    assert list_fetched_shards(hub) < list_shards(folder, "")
    assert read_facts(found.folder, (1, 2)).block_elements > 0
    with pytest.raises(ModelSourceError, match="has no model-"):
        read_facts(found.folder)


def test_head_and_tail_also_download_embedding_and_lm_head(
    hub: Hub, locations: SourceLocations, folder: Path
) -> None:
    resolve("hf://acme/tiny", (0, 1), locations)
    assert list_fetched_shards(hub) == list_shards(folder, "layers.0.", "embed_tokens")
    hub.fetched.clear()
    resolve("hf://acme/tiny@main", (3, 4), locations)
    wanted = list_shards(folder, "layers.3.", "model.norm", "lm_head")
    assert list_fetched_shards(hub) == wanted - list_shards(folder, "layers.0.", "embed_tokens")


def test_tail_also_downloads_a_head_stored_beside_its_tie(folder: Path, tmp_path: Path) -> None:
    """The server compares it with the embedding; one that differs is refused."""
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text()) | {"tie_word_embeddings": True}
    (copy / "config.json").write_text(json.dumps(config))
    with serve("acme/tied", copy) as hub:
        locations = SourceLocations(hub_endpoint=hub.url, hub_cache=tmp_path / "cache")
        resolve("hf://acme/tied", (3, 4), locations)
        wanted = list_shards(folder, "layers.3.", "model.norm", "embed_tokens", "lm_head")
        assert list_fetched_shards(hub) == wanted


def test_download_reports_all_bytes_of_the_shards(
    hub: Hub, locations: SourceLocations, folder: Path
) -> None:
    seen: list[tuple[int, int]] = []

    resolve("hf://acme/tiny", (1, 2), locations, lambda done, total: seen.append((done, total)))

    size = sum((folder / name).stat().st_size for name in list_shards(folder, "layers.1."))
    assert seen[0] == (0, 0)
    assert seen[-1] == (size, size)
    assert all(done <= total for done, total in seen)


def test_comparison_of_hashes_is_progress_too(hub: Hub, locations: SourceLocations) -> None:
    """`up` ends a start without progress for 180 s, which the hashes of a large model take."""
    hub.hashes_weights = True
    seen: list[tuple[int, int]] = []

    found = resolve("hf://acme/tiny", (1, 2), locations, lambda *each: seen.append(each))

    files = [file for file in found.folder.iterdir() if file.suffix == ".safetensors"]
    size = sum(file.stat().st_size for file in files)
    assert seen.count((size, size)) >= 2
    assert 0 < seen[-len(files)][0] < size


def test_downloaded_model_is_not_fetched_again(hub: Hub, locations: SourceLocations) -> None:
    first = resolve("hf://acme/tiny", None, locations)
    hub.fetched.clear()
    assert resolve("hf://acme/tiny", None, locations) == first
    assert hub.fetched == []
    assert (first.folder / MODEL_FILES[2]).is_file()


def test_weights_with_another_hash_than_the_hubs_are_refused(
    hub: Hub, locations: SourceLocations, folder: Path
) -> None:
    hub.hashes_weights = True
    shard = min(list_shards(folder, "layers.0."))
    hub.damaged.add(shard)
    with pytest.raises(
        ModelSourceError, match=f"{shard} has the SHA-256 [0-9a-f]{{64}}, but the hub"
    ):
        resolve("hf://acme/tiny", (0, 1), locations)
    hub.damaged.clear()
    found = resolve("hf://acme/tiny", (0, 1), locations)
    assert (found.folder / shard).read_bytes() == (folder / shard).read_bytes()
    assert hub.fetched.count(shard) == 2, "the damaged file was deleted"


def test_download_of_a_killed_start_is_compared_by_the_next(
    hub: Hub, locations: SourceLocations, folder: Path
) -> None:
    """The first process ends when all files are there and none is compared with its hash."""
    hub.hashes_weights = True
    shard = min(list_shards(folder, "layers.0."))
    hub.damaged.add(shard)
    killed = f"""
import os
import sys
from pathlib import Path
from modelswarm.checkpoint.sources import SourceLocations, resolve

def end(event, args):
    if event == "open" and str(args[0]).endswith("/snapshots/{COMMIT}/{shard}"):
        os._exit(9)

sys.addaudithook(end)
where = SourceLocations(hub_endpoint="{hub.url}", hub_cache=Path("{locations.hub_cache}"))
resolve("hf://acme/tiny", (0, 1), where)
"""
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == 9
    assert hub.fetched.count(shard) == 1
    with pytest.raises(ModelSourceError, match=f"{shard} has the SHA-256 [0-9a-f]{{64}}"):
        resolve("hf://acme/tiny", (0, 1), locations)


def test_every_failure_of_the_hubs_library_is_one_sentence(
    locations: SourceLocations, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library closes the client of all its threads when the network fails in one."""

    def download(*_: object, **__: object) -> str:
        raise RuntimeError("Cannot send a request, as the client has been closed.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(
        ModelSourceError, match=f"the network is the cause, {hub.url} does not answer"
    ):
        resolve("hf://acme/tiny", None, locations)


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("hf://acme/none", "hf://acme/none: there is no such model"),
        ("hf://acme/tiny@v9", "hf://acme/tiny@v9: there is no such revision"),
        ("hf://a/b/c", "is not hf://ORG/NAME"),
        ("hf://", "is not hf://ORG/NAME"),
        ("hf://acme/tiny@../../x", "has a revision with `..`"),
        ("hf://acme/tiny@refs/../x", "has a revision with `..`"),
    ],
)
def test_invalid_hub_address_is_named(
    locations: SourceLocations, source: str, sentence: str
) -> None:
    with pytest.raises(ModelSourceError, match=sentence):
        resolve(source, None, locations)


def test_unreachable_hub_raises_model_source_error(tmp_path: Path) -> None:
    locations = SourceLocations(hub_endpoint="http://127.0.0.1:9", hub_cache=tmp_path)
    with pytest.raises(ModelSourceError, match="hf://acme/tiny cannot be downloaded"):
        resolve("hf://acme/tiny", locations=locations)


def test_hub_endpoint_is_read_from_the_environment(hub: Hub, tmp_path: Path) -> None:
    program = "from modelswarm.checkpoint.sources import resolve; resolve('hf://acme/tiny', (0, 1))"
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=300)
    assert list_fetched_shards(hub)


def test_blocks_out_of_range_are_refused_before_download(
    hub: Hub, locations: SourceLocations
) -> None:
    with pytest.raises(UserError, match="blocks: 2:9 is out of range: the model has blocks 0:4"):
        resolve("hf://acme/tiny", (2, 9), locations)
    assert list_fetched_shards(hub) == set()


def test_local_addresses_resolve_to_folders(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "claim").mkdir()
    (tmp_path / "claim" / "tiny").symlink_to(folder)
    same = {
        resolve(str(folder)).revision,
        resolve(f"file://{folder}").revision,
        resolve("pvc://claim/tiny", locations=SourceLocations(pvc_root=tmp_path)).revision,
    }
    assert len(same) == 1
    assert resolve("demo://counting").folder == counting_folder()


def write_byte(path: Path, at: int, value: int) -> None:
    with path.open("r+b") as handle:
        handle.seek(at)
        handle.write(bytes([value]))


@pytest.mark.parametrize("name", ["two words", "a%41b", "a#b?c;d", "größe", "plain"])
def test_address_of_any_folder_leads_to_it(tmp_path: Path, name: str) -> None:
    """Also of a name that URLs write otherwise; documents take the address."""
    folder = tmp_path / name
    folder.mkdir()
    address = known_address(str(folder))
    assert address is not None and ADDRESS.predicate(address), address
    assert resolve_config_files(address) == folder


@pytest.mark.parametrize("shard_size", ["1GB", "100KB"])
def test_other_weights_of_the_same_layout_are_another_revision(
    tmp_path: Path, shard_size: str
) -> None:
    folder = make_model(tmp_path / "model", "llama", shard_size=shard_size)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    first = resolve(str(folder)).revision
    assert resolve(str(copy)).revision == first

    for shard in sorted(copy.glob("*.safetensors")):
        size, content = shard.stat().st_size, shard.read_bytes()
        with safe_open(folder / shard.name, framework="np") as tensors:
            names = list(tensors.keys())
        for name in names:
            start, end = read_offsets(content, name)
            middle = (start + end) // 2
            write_byte(shard, middle, content[middle] ^ 1)
            assert resolve(str(copy)).revision != first, name
            write_byte(shard, middle, content[middle])
        assert (shard.stat().st_size, resolve(str(copy)).revision) == (size, first)


def read_offsets(content: bytes, name: str) -> tuple[int, int]:
    length = int.from_bytes(content[:8], "little")
    start, end = json.loads(content[8 : 8 + length])[name]["data_offsets"]
    return 8 + length + start, 8 + length + end


def test_folder_without_a_shard_is_another_revision(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama", shard_size="100KB")
    first = resolve(str(folder)).revision
    sorted(folder.glob("*.safetensors"))[-1].unlink()
    assert resolve(str(folder)).revision != first


def test_fingerprint_reads_a_sample_of_a_large_file(tmp_path: Path) -> None:
    """The file has a hole of 1 TiB: reading all of it would not end."""
    entry = {"dtype": "F16", "shape": [1 << 39], "data_offsets": [0, 1 << 40]}
    header = json.dumps({"model.norm.weight": entry}).encode()
    path = tmp_path / "model.safetensors"
    with path.open("wb") as handle:
        handle.write(len(header).to_bytes(8, "little") + header)
        handle.truncate(8 + len(header) + (1 << 40))
    first = fingerprint(tmp_path)
    write_byte(path, 8 + len(header) + (1 << 39), 1)
    assert fingerprint(tmp_path) != first


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("/no/such/folder", "/no/such/folder is not a folder"),
        ("file:///no/such", "/no/such is not a folder"),
        ("s3://bucket/x", "'s3://bucket/x' is not a model address; allowed are demo://counting"),
        ("demo://other", "is not a model address"),
        ("pvc://claim/../../etc", "must not leave its volume"),
    ],
)
def test_invalid_local_address_is_named(source: str, sentence: str) -> None:
    with pytest.raises(ModelSourceError, match=sentence):
        resolve(source)
