"""A tokenizer or chat template of the swarm replaces the model's own, from server to client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from support.models.tiny_models import make_model
from support.processes.fake_gateway import fake_gateway
from support.processes.forked_process import fork_process
from support.processes.server import servers
from support.processes.swarm import HASH, document
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from modelswarm.checkpoint.chat_template import TEMPLATE_FILE, TOOL_TEMPLATE_FILE
from modelswarm.errors import UserError
from modelswarm.local.planning import plan_document
from modelswarm.local.swarm import LocalSwarm
from modelswarm.resources.spec import ModelSwarm
from modelswarm_serving.app import load
from modelswarm_serving.runtime.model_files import ModelFiles, open_model_files
from modelswarm_serving.settings import parse_settings

TEMPLATE = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return another model with the same vocabulary size; only its tokenizer files are used."""
    made = make_model(tmp_path_factory.mktemp("words"), "llama", seed=1)
    (made / "generation_config.json").write_text('{"temperature": 0.123}')
    (made / "chat_template.jinja").unlink(missing_ok=True)
    (made / "special_tokens_map.json").write_text('{"pad_token": "<pad>"}')
    return made


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "template"
    path.write_text(TEMPLATE)
    return path


def test_tokenizer_files_come_from_its_own_folder(
    folder: Path, words: Path, tmp_path: Path
) -> None:
    (tmp_path / "x").mkdir()
    own = tmp_path / "x" / "config.json"
    own.write_text("{}")
    (tmp_path / "x" / "chat_template.jinja").write_text("the model's")

    files = ModelFiles(tmp_path / "x", words)

    assert files.read_file("config.json") == b"{}"
    assert files.read_file("generation_config.json") is None
    assert files.read_file("tokenizer.json") == (words / "tokenizer.json").read_bytes()
    assert files.read_file("special_tokens_map.json") == b'{"pad_token": "<pad>"}'
    assert files.read_file("chat_template.jinja") is None  # the model's does not fit
    assert files.read_file("../x/config.json") is None


def test_template_flag_replaces_the_models_template(folder: Path, words: Path) -> None:
    for files in (ModelFiles(folder, None, b"t"), ModelFiles(folder, words, b"t")):
        assert files.read_file("chat_template.jinja") == b"t"
    assert ModelFiles(None, None, b"t").read_file("chat_template.jinja") == b"t"


def test_flag_replaces_the_saved_template_for_tools_too(tmp_path: Path) -> None:
    named = {"default": "all", "tool_use": "tools"}
    library: Any = PreTrainedTokenizerFast
    tokenizer = library(tokenizer_object=Tokenizer(WordLevel({"a": 0})))
    tokenizer.chat_template = named
    tokenizer.save_pretrained(tmp_path)

    files, replaced = ModelFiles(tmp_path), ModelFiles(tmp_path, None, b"t")

    assert (files.read_file(TEMPLATE_FILE), files.read_file(TOOL_TEMPLATE_FILE)) == (
        b"all",
        b"tools",
    )
    assert replaced.read_file(TOOL_TEMPLATE_FILE) is None


def test_revision_follows_the_tokenizer_files(folder: Path, words: Path) -> None:
    marks = [
        ModelFiles(folder).revision_suffix,
        ModelFiles(folder, words).revision_suffix,
        ModelFiles(folder, None, b"a").revision_suffix,
        ModelFiles(folder, None, b"b").revision_suffix,
        ModelFiles(folder, words, b"a").revision_suffix,
    ]

    assert marks[0] == ""
    assert len(set(marks)) == len(marks)
    assert ModelFiles(folder, words, b"a").revision_suffix == marks[4]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"{% if %}", "--chat-template: the chat template does not compile: line 1: Expected"),
        (b"a\n{% endfor %}", "does not compile: line 2: Encountered unknown tag 'endfor'"),
        (b"\xff", "is not UTF-8 text"),
        (b"x" * ((1 << 20) + 1), "is larger than 1048576 bytes"),
    ],
)
def test_a_template_that_is_none_is_refused(tmp_path: Path, content: bytes, sentence: str) -> None:
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        open_model_files(None, None, tmp_path / "t")


def test_missing_tokenizer_is_refused_by_the_flag_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--chat-template: .*/none cannot be read: No such file"):
        open_model_files(None, None, tmp_path / "none")
    with pytest.raises(UserError, match=r"--tokenizer: 's3://b' is not a model address"):
        open_model_files(None, "s3://b", None)


@pytest.mark.full
def test_model_without_tokenizer_is_served_with_another(
    tmp_path: Path, folder: Path, words: Path
) -> None:
    bare = make_model(tmp_path / "bare", "llama")
    (bare / "tokenizer.json").unlink()
    flags = ["--name", "s", "--blocks", "0:2", "--model", f"file://{bare}", "--max-length", "64"]

    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        load(parse_settings(flags))
    loaded = load(parse_settings([*flags, "--tokenizer", f"file://{words}"]))

    assert loaded.files.read_file("tokenizer.json") == (words / "tokenizer.json").read_bytes()
    assert loaded.revision.endswith(loaded.files.revision_suffix)


@pytest.mark.full
async def test_gateway_receives_the_files_of_the_flags(
    tmp_path: Path, folder: Path, words: Path, template: Path
) -> None:
    flags = ("--hash-model", "--model", f"file://{folder}")
    own = ("--tokenizer", f"file://{words}", "--chat-template", str(template))
    async with (
        servers(tmp_path / "members", ["0:4"], *flags, *own, "--hold-limit", "1.5") as started,
        fake_gateway(started) as gateway,
    ):
        [hello] = gateway.received.up
        assert "+" in hello.revision
        assert hello.hold_ms == 1500
        assert await gateway.file("chat_template.jinja") == TEMPLATE.encode()
        assert await gateway.file("special_tokens_map.json") == b'{"pad_token": "<pad>"}'
        assert await gateway.file("config.json") == (folder / "config.json").read_bytes()


def prompt_tokens(swarm: LocalSwarm) -> int:
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 1}
    answer = httpx.post(f"http://{swarm.http}/v1/chat/completions", json=body, timeout=60)
    return int(answer.raise_for_status().json()["usage"]["prompt_tokens"])


@pytest.mark.full
def test_a_document_with_a_template_is_answered_by_it(folder: Path, tmp_path: Path) -> None:
    model = {"source": f"file://{folder}", "chatTemplate": "{{ messages[0]['content'] }}"}
    short = plan_document(ModelSwarm.parse(document(folder, model=model)))
    model["chatTemplate"] = "{{ messages[0]['content'] * 7 }}"
    long = plan_document(ModelSwarm.parse(document(folder, model=model)))

    with LocalSwarm(short, HASH, spawn=fork_process) as swarm:
        one = prompt_tokens(swarm)
    with LocalSwarm(long, HASH, spawn=fork_process) as swarm:
        seven = prompt_tokens(swarm)

    assert seven == 7 * one


@pytest.mark.full
@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"chatTemplate": "{% if %}"}, "spec.model.chatTemplate: the chat template does not"),
        ({"tokenizer": "pvc://claim/x"}, "spec.model.tokenizer: pvc:// names a volume"),
        ({"tokenizer": "file:///none"}, "/none is not a folder"),
        ({"quantization": "int8"}, "spec.model.quantization: 'int8' is not served yet"),
    ],
)
def test_unusable_tokenizer_is_refused_before_start(
    folder: Path, change: dict[str, str], sentence: str
) -> None:
    model = {"source": f"file://{folder}", **change}

    with pytest.raises(UserError, match=sentence):
        plan_document(ModelSwarm.parse(document(folder, model=model)))
