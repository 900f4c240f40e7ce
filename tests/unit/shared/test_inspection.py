"""An inspection prints the facts of a model without reading its weights, or the reason for its refusal."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support.models.hub_server import COMMIT, Hub, serve
from support.models.tiny_models import make_model

from modelswarm.checkpoint.facts import read_facts
from modelswarm.checkpoint.inspection import (
    MAX_OUTPUT_BYTES,
    MAX_WARNING_LENGTH,
    facts_document,
    facts_from_document,
    inspect_model,
    template_faults,
)
from modelswarm.checkpoint.sources import SourceLocations, resolve, resolve_config_files
from modelswarm.checkpoint.tokenizer import check_tokenizer
from modelswarm.demo import counting_folder
from modelswarm.errors import ModelSourceError
from modelswarm.resources.spec import API_VERSION, KIND


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("tiny"), "llama")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


@pytest.fixture
def hub(copy: Path) -> Iterator[Hub]:
    with serve("acme/tiny", copy) as running:
        yield running


def run_inspection(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "modelswarm.checkpoint.inspection", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env=os.environ | environment
    )


def refusal_message(
    source: str, tokenizer: str | None = None, locations: SourceLocations | None = None
) -> str:
    with pytest.raises(ModelSourceError) as caught:
        inspect_model(source, tokenizer, locations)
    return caught.value.message


def test_inspection_output_is_one_object_read_back_as_facts(tmp_path: Path) -> None:
    output = tmp_path / "termination-log"
    output.touch()

    done = run_inspection("--model", "demo://counting", "--output", str(output))

    assert (done.returncode, done.stderr) == (0, "")
    written = output.read_text()
    assert len(written) < 4096
    assert done.stdout.strip() == written
    assert facts_from_document(json.loads(written)) == read_facts(counting_folder())
    assert set(json.loads(written)) == {
        *("blocks", "context", "vocab", "hidden", "dtype", "blockElements", "embeddingElements"),
        *("kvElements", "tied", "family", "revision", "fileBytes"),
    }


def test_blocks_without_experts_are_read_back(tmp_path: Path) -> None:
    facts = read_facts(make_model(tmp_path, "qwen3_moe"))
    document = json.loads(json.dumps(facts_document(facts, "c0ffee")))
    assert document["smallerBlocks"] == [2]
    assert facts_from_document(document) == facts


def test_size_of_all_files_is_at_least_that_of_the_text_model(folder: Path, copy: Path) -> None:
    facts = read_facts(folder)
    whole = facts.weight_bytes(0, facts.config.n_blocks, facts.dtype)
    index = copy / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    assert inspect_model(str(copy)).file_bytes >= whole

    for stated, size in (
        (10 * whole, 10 * whole),
        (1, whole),
        ("many", whole),
        (-1, whole),
        (1 << 60, whole),
    ):
        index.write_text(json.dumps(content | {"metadata": {"total_size": stated}}))
        assert inspect_model(str(copy)).file_bytes == size
    index.write_text(json.dumps(content | {"metadata": 7}))
    assert inspect_model(str(copy)).file_bytes == whole


def test_inspection_warns_of_a_template_by_the_models_address(copy: Path, tmp_path: Path) -> None:
    (copy / "chat_template.jinja").write_text("{# one #}\n{% for m in %}")
    done = run_inspection("--model", f"file://{copy}", "--output", str(tmp_path / "log"))
    assert (done.returncode, done.stderr) == (0, "")
    (warning,) = json.loads(done.stdout)["warnings"]
    assert warning.startswith(
        f"file://{copy}/chat_template.jinja: the chat template does not compile: line 2: "
    )
    assert facts_from_document(json.loads(done.stdout)) == read_facts(copy)
    assert len((tmp_path / "log").read_bytes()) < MAX_OUTPUT_BYTES


def test_long_warning_leaves_the_output_readable(copy: Path, tmp_path: Path) -> None:
    (copy / "chat_template.jinja").write_text("{{ x|" + "日" * 5000 + " }}")
    done = run_inspection("--model", f"file://{copy}", "--output", str(tmp_path / "log"))
    written = (tmp_path / "log").read_bytes()
    assert (done.returncode, len(written) < MAX_OUTPUT_BYTES) == (0, True)
    assert len(json.loads(written)["warnings"][0]) == MAX_WARNING_LENGTH


def test_model_without_a_chat_template_is_a_warning(copy: Path) -> None:
    settings = copy / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": None}))
    (warning,) = inspect_model(f"file://{copy}").warnings
    assert warning.startswith(f"{copy} has no chat template; text completions work, ")


def test_hub_inspection_fetches_only_headers_of_block_0(
    hub: Hub, copy: Path, tmp_path: Path
) -> None:
    locations = SourceLocations(hub_endpoint=hub.url, hub_cache=tmp_path / "cache")

    found = inspect_model("hf://acme/tiny", locations=locations)

    assert found.revision == COMMIT
    assert found.facts == read_facts(copy)
    assert not [name for name in hub.fetched if name.endswith(".safetensors")]
    index = json.loads((copy / "model.safetensors.index.json").read_text())["weight_map"]
    shards_of_block_0 = {
        file for name, file in index.items() if "layers.0." in name or "embed" in name
    }
    assert set(hub.ranged) == shards_of_block_0


def test_single_file_model_is_inspected_by_its_header(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "one", "qwen3", shard_size="1GB")
    locations = SourceLocations(hub_cache=tmp_path / "cache")
    with serve("acme/one", folder) as hub:
        locations = SourceLocations(hub_endpoint=hub.url, hub_cache=tmp_path / "cache")
        found = inspect_model("hf://acme/one@main", locations=locations)

        assert (found.facts, hub.ranged) == (read_facts(folder), ["model.safetensors"])
        assert "model.safetensors" not in hub.fetched


def test_hub_model_without_safetensors_is_refused_by_the_file(tmp_path: Path) -> None:
    """As most models of 2022, which have pytorch_model.bin alone."""
    folder = make_model(tmp_path / "one", "qwen3", shard_size="1GB")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with serve("acme/one", folder) as hub:
        locations = SourceLocations(hub_endpoint=hub.url, hub_cache=tmp_path / "cache")
        message = refusal_message("hf://acme/one", locations=locations)

    missing = "has no model.safetensors (safetensors weights are needed)"
    assert message == f"hf://acme/one@{COMMIT} {missing}"


def test_plan_of_a_hub_model_names_the_commit(hub: Hub, tmp_path: Path) -> None:
    """Servers load what was planned, also those that start again after the branch has moved."""
    spec = {"model": {"source": "hf://acme/tiny", "revision": "main"}, "spans": {"count": 2}}
    document = {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": "a"}, "spec": spec}
    path = tmp_path / "swarm.yaml"
    path.write_text(json.dumps(document))
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "modelswarm.cli", "plan", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)

    assert f"hf://acme/tiny@{COMMIT}, 4 blocks" in done.stdout, done.stderr


def test_gated_model_is_inspected_with_the_environment_token(hub: Hub, tmp_path: Path) -> None:
    hub.token = "hf_secret"
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}

    without = run_inspection("--model", "hf://acme/tiny", **environment)
    done = run_inspection("--model", "hf://acme/tiny", HF_TOKEN="hf_secret", **environment)

    assert without.returncode == 2
    assert without.stdout == "hf://acme/tiny is gated: set HF_TOKEN to use it\n"
    assert (done.returncode, json.loads(done.stdout)["revision"]) == (0, COMMIT)
    assert "hf_secret" not in done.stdout + done.stderr + without.stdout + without.stderr


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("layers.2.", "hf://acme/tiny has no weights for block 2"),
        ("layers.2.mlp.up", "hf://acme/tiny has no weights for model.layers.2.mlp.up_proj.weight"),
        ("model.norm", "hf://acme/tiny has no weights for model.norm.weight"),
    ],
)
def test_index_without_a_part_of_the_model_is_refused(
    hub: Hub, copy: Path, tmp_path: Path, missing: str, sentence: str
) -> None:
    index = copy / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] = {
        name: file for name, file in content["weight_map"].items() if missing not in name
    }
    index.write_text(json.dumps(content))
    locations = SourceLocations(hub_endpoint=hub.url, hub_cache=tmp_path / "cache")

    assert refusal_message("hf://acme/tiny", locations=locations) == sentence


def test_weights_other_than_safetensors_are_refused(hub: Hub, copy: Path, tmp_path: Path) -> None:
    locations = SourceLocations(hub_endpoint=hub.url, hub_cache=tmp_path / "cache")
    first = sorted(copy.glob("*.safetensors"))[0]
    first.write_bytes(b"\xff" * 5000)

    message = refusal_message("hf://acme/tiny", locations=locations)

    assert message == f"hf://acme/tiny@{COMMIT}: {first.name} is not a safetensors file"
    first.unlink()
    assert "hf://acme/tiny" in refusal_message("hf://acme/tiny", locations=locations)


def test_pvc_model_is_inspected_under_its_mount(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "tiny").symlink_to(folder)

    found = inspect_model("pvc://weights/tiny", locations=SourceLocations(pvc_root=tmp_path))

    assert found.facts == read_facts(folder)


def test_missing_tokenizer_is_one_line_and_exit_code_2(copy: Path, tmp_path: Path) -> None:
    (copy / "tokenizer.json").unlink()
    output = tmp_path / "termination-log"

    done = run_inspection("--model", f"file://{copy}", "--output", str(output))

    assert done.returncode == 2
    assert output.read_text() == (
        f"file://{copy}: {copy} has no tokenizer.json; a fast tokenizer is needed"
    )


def test_tokenizer_and_template_of_the_package_can_be_used() -> None:
    found = inspect_model("demo://counting")

    check_tokenizer(counting_folder(), found.facts.config.vocab)
    assert template_faults(counting_folder()) == found.warnings == ()


def test_fields_of_generation_config_without_effect_are_named(copy: Path, folder: Path) -> None:
    path = copy / "generation_config.json"
    path.write_text(json.dumps({"num_beams": 4, "guidance_scale": 1, "top_p": 0.5, "top_h": 0.4}))

    [warning] = inspect_model(f"file://{copy}").warnings

    assert warning.startswith("generation_config.json: num_beams, top_h would change answers")
    path.write_text(json.dumps({"suppress_tokens": list(range(600))}))
    [warning] = inspect_model(f"file://{copy}").warnings
    assert "bad_words_ids, suppress_tokens" in warning
    path.write_text(json.dumps({"max_time": 2.5, "token_healing": False}))
    [warning] = inspect_model(f"file://{copy}").warnings
    assert warning.startswith("generation_config.json: max_time would change answers")
    path.write_text(json.dumps({"suppress_tokens": list(range(600))}))
    # The tokenizer's folder has one too, and no server reads it.
    assert "suppress_tokens" in inspect_model(f"file://{copy}", f"file://{folder}").warnings[0]
    assert inspect_model(f"file://{folder}", f"file://{copy}").warnings == ()
    path.write_text(json.dumps({"top_p": 0.5}))
    assert inspect_model(f"file://{copy}").warnings == ()


def test_other_tokenizer_of_the_demo_model_is_checked(tmp_path: Path) -> None:
    assert "has no tokenizer.json" in refusal_message("demo://counting", str(tmp_path))


def test_separate_tokenizer_replaces_the_models_own(
    copy: Path, folder: Path, tmp_path: Path
) -> None:
    (copy / "tokenizer.json").unlink()
    other = make_model(tmp_path / "other", "llama", vocab=64)

    assert inspect_model(f"file://{copy}", f"file://{folder}").facts == read_facts(folder)
    message = refusal_message(f"file://{other}", "demo://counting")
    assert "vocab_size in config.json is 64, but " in message
    assert message.endswith("has ids up to 260; allowed is a vocab_size of at least 261")
    assert "is not a model address" in refusal_message("demo://counting", "s3://bucket")


def test_uncompilable_chat_template_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    template, output = tmp_path / "t.jinja", tmp_path / "termination-log"
    flags = ("--model", "demo://counting", "--chat-template", str(template))
    template.write_text("{% generation %}{{ messages }}{% endgeneration %}{% break %}")
    invalid = run_inspection(*flags, "--output", str(output))
    template.write_text("{% for m in messages %}{% generation %}x{% endgeneration %}{% endfor %}")
    valid = run_inspection(*flags)

    assert (invalid.returncode, valid.returncode) == (2, 0)
    assert "the chat template does not compile" in output.read_text()
    template.unlink()
    assert "t.jinja cannot be read" in run_inspection(*flags).stdout


def test_truncated_weights_are_one_line_and_exit_code_2(copy: Path) -> None:
    shard = sorted(copy.glob("*.safetensors"))[0]
    os.truncate(shard, shard.stat().st_size - 100)

    done = run_inspection("--model", f"file://{copy}")

    assert done.returncode == 2
    assert done.stdout == f"file://{copy}: {shard} is truncated: 100 bytes are missing\n"


def test_block_without_weights_is_refused(copy: Path) -> None:
    for shard in copy.glob("*.safetensors"):
        kept = {n: t for n, t in load_file(shard).items() if ".layers.3." not in n}
        save_file(kept or {"other": load_file(shard).popitem()[1]}, shard)

    assert "no weights for block 3" in refusal_message(f"file://{copy}")


def test_inspection_error_fits_a_termination_message(tmp_path: Path) -> None:
    deep = tmp_path / ("ü" * 100) / ("ö" * 100) / ("x" * 200)
    folder = "/".join([str(deep)] * 12)

    done = run_inspection("--model", f"file://{folder}")

    assert done.returncode == 2
    assert len(done.stdout.strip().encode()) <= MAX_OUTPUT_BYTES < 4096
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"blocks": 0}, "not facts of a model: blocks: Input should be greater than or equal to 1"),
        (
            {"blocks": 4097},
            "not facts of a model: blocks: Input should be less than or equal to 4096",
        ),
        ({"blocks": "8"}, "not facts of a model: blocks: Input should be a valid integer"),
        ({"dtype": "int4"}, "not facts of a model: dtype: Input should be 'float32'"),
        ({"kvElements": None}, "not facts of a model: kvElements: Input should be a valid integer"),
    ],
)
def test_invalid_facts_document_is_refused(change: dict[str, Any], sentence: str) -> None:
    document = facts_document(read_facts(counting_folder()), "r") | change

    with pytest.raises(ModelSourceError) as caught:
        facts_from_document(document)

    assert caught.value.message.startswith(sentence)


def test_unknown_fields_of_a_facts_document_are_ignored() -> None:
    facts = read_facts(counting_folder())

    assert facts_from_document(facts_document(facts, "r") | {"experts": 8}) == facts


NETWORK = (
    "hf://acme/tiny cannot be downloaded: the network is the cause, {url} does not answer ({reason}); "
    "set HF_ENDPOINT to a mirror, set HF_HUB_OFFLINE=1 if the model is in the cache, "
    "or give the path of a local copy (file:///FOLDER)"
)


@pytest.fixture
def closed_port() -> str:
    """Return an address that refuses connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_unreachable_hub_is_named_as_the_cause(closed_port: str, tmp_path: Path) -> None:
    locations = SourceLocations(hub_endpoint=closed_port, hub_cache=tmp_path)
    message = refusal_message("hf://acme/tiny", locations=locations)
    assert message == NETWORK.format(url=closed_port, reason="[Errno 111] Connection refused")


def test_hub_lost_between_two_files_is_named_as_the_cause(
    hub: Hub, closed_port: str, tmp_path: Path
) -> None:
    """The configuration is in the cache, the weights are not."""
    cached = SourceLocations(hub_endpoint=hub.url, hub_cache=tmp_path)
    resolve_config_files("hf://acme/tiny", cached)
    locations = SourceLocations(hub_endpoint=closed_port, hub_cache=tmp_path)
    message = refusal_message("hf://acme/tiny", locations=locations)
    expected = NETWORK.format(url=closed_port, reason="[Errno 111] Connection refused")
    assert message == expected.replace("hf://acme/tiny", f"hf://acme/tiny@{COMMIT}", 1)


def test_hub_that_closes_its_connections_is_named_as_the_cause(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        closing = threading.Thread(target=close_connections, args=(server,), daemon=True)
        closing.start()
        locations = SourceLocations(hub_endpoint=url, hub_cache=tmp_path)
        message = refusal_message("hf://acme/tiny", locations=locations)
        server.shutdown(socket.SHUT_RDWR)
        closing.join(60)
    assert message.startswith(
        f"hf://acme/tiny cannot be downloaded: the network is the cause, {url} does not answer"
    )


def close_connections(server: socket.socket) -> None:
    """Accept and close, until the listening socket is shut down."""
    while True:
        try:
            server.accept()[0].close()
        except OSError:
            return


def test_offline_mode_needs_the_cache_and_no_network(hub: Hub, tmp_path: Path) -> None:
    offline = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path)}
    without = run_inspection("--model", "hf://acme/tiny", **offline)
    resolve(
        "hf://acme/tiny", None, SourceLocations(hub_endpoint=hub.url, hub_cache=tmp_path / "hub")
    )
    asked = list(hub.fetched)

    done = run_inspection("--model", "hf://acme/tiny", **offline)

    assert without.returncode == 2
    assert without.stdout == (
        "hf://acme/tiny is not in the cache, and HF_HUB_OFFLINE forbids downloads: unset it, "
        "or give the path of a local copy (file:///FOLDER)\n"
    )
    assert (done.returncode, json.loads(done.stdout)["revision"]) == (0, COMMIT)
    assert hub.fetched == asked
