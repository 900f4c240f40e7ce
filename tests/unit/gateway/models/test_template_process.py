"""Hostile chat templates: check and template process stay within bounds, and only that model's chats fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from support.eventually import eventually
from support.models.tokenizers import encode_bytes, model_files, template_process

from modelswarm_gateway.models.chat_prompts import SMALL_REQUEST_BYTES
from modelswarm_gateway.models.chat_template import TemplateError, template_variables
from modelswarm_gateway.models.template_process import (
    TemplateBudgetError,
    TemplateProcess,
    TemplateProcessError,
    child_environment,
)
from modelswarm_gateway.models.template_worker import MAX_REASON_CHARACTERS
from modelswarm_gateway.models.tokenizer import ModelTokenizer

HI = [{"role": "user", "content": "hi"}]
HUGE = "10000000000"
RANGES = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
BOMBS = {
    "nested ranges": RANGES,
    "power": "{% set x = (7 ** 300000000) % 10 %}{{ x }}",
    "power in an output": "{{ (7 ** 300000000) % 10 }}",
    "repeated text": f"{{{{ ('a' * {HUGE})|length }}}}",
    "repeated list": f"{{% set x = [1] * {HUGE} %}}",
    "repeated by the messages": f"{{{{ 'a' * (messages|length * {HUGE}) }}}}",
    "wide format": "{{ '%2000000000d' % 1 }}",
    "wide format method": "{{ '{:>2000000000}'.format(1) }}",
    "centred text": f"{{{{ 'a'|center({HUGE}) }}}}",
    "autoescape of centred text": f"{{% autoescape 'a'|center({HUGE}) %}}a{{% endautoescape %}}",
    "padded batch": f"{{{{ [1]|batch({HUGE}, 0)|list }}}}",
    "rounding": "{{ 1|round(300000000, 'ceil') }}",
    "recursive macro": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "shared lists": (
        "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}"
        "{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a }}"
    ),
    "lipsum": "{{ lipsum(n=1000000000) }}",
}
CHECK = """
import resource, sys
from modelswarm.checkpoint.chat_template import check_template
resource.setrlimit(resource.RLIMIT_AS, (256 << 20, 256 << 20))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
for line in sys.stdin:
    check_template(line.rstrip().replace("\\\\n", "\\n"))
"""
CHILD_SECONDS = 300.0  # seconds; generous, as the processor time has a lower limit


@pytest.fixture(scope="module")
def impatient() -> Iterator[TemplateProcess]:
    templates = TemplateProcess(cpu_seconds=0.5)
    yield templates
    templates.close()


def test_check_of_bombs_computes_nothing() -> None:
    """A child has 256 MiB and 60 s of processor time for all of them."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        input="\n".join(BOMBS.values()),
        text=True,
        capture_output=True,
        timeout=CHILD_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
async def test_bomb_ends_its_own_request_only(bomb: str, impatient: TemplateProcess) -> None:
    with pytest.raises(
        TemplateError, match=r"took more than|needed more than|cannot render|is und"
    ):
        await impatient.render(bomb, template_variables(HI, {}, {}))
    assert await impatient.render("{{ messages[0].content }}", {"messages": HI}) == "hi"


async def test_second_bomb_ends_the_chats_of_its_model_only(impatient: TemplateProcess) -> None:
    hostile = ModelTokenizer(model_files(template=RANGES), impatient)
    other = ModelTokenizer(model_files(), impatient)
    assert hostile.chat_fault == ""
    for _ in range(2):
        with pytest.raises(TemplateBudgetError, match=r"took more than 0\.5 s of processor time"):
            await hostile.encode_chat(HI)
    assert hostile.chat_fault == (
        "tokenizer_config.json: the model's chat template took more than 0.5 s of processor time, "
        "2 times; text completions work"
    )
    with pytest.raises(TemplateError, match="2 times; text completions work"):
        await hostile.encode_chat(HI)
    assert await hostile.encode("hi", special=False) == encode_bytes("hi")
    assert await other.encode_chat(HI)
    assert other.chat_fault == ""


async def test_memory_of_other_templates_blames_no_model() -> None:
    """A constant in an output stays in the compiled template, which the child keeps for the next request."""
    templates = TemplateProcess()
    half = "{{ ('b' * (messages|length * 250000000))|length }}"
    assert await templates.render(half, {"messages": HI}) == "250000000"
    for place in range(14):
        templates.check(f"{{{{ 'a' * {20_000_000 + place} }}}}")
    assert await templates.render(half, {"messages": HI}) == "250000000"
    templates.close()


async def test_reason_of_a_refusal_is_bounded() -> None:
    """A template may refuse with any text, which would become an error message, and its compiler may quote it."""
    long = "{{ raise_exception('a' * 100000) }}"
    with pytest.raises(TemplateError) as refused:
        await template_process().render(long, template_variables(HI, {}, {}))
    assert len(str(refused.value)) <= MAX_REASON_CHARACTERS
    with pytest.raises(TemplateError) as broken:
        template_process().check("{% " + "a" * 100_000 + " %}")
    assert len(str(broken.value)) <= MAX_REASON_CHARACTERS


async def test_large_request_does_not_end_the_chats(impatient: TemplateProcess) -> None:
    slow = (
        "{% for m in messages %}{% if m.content|length > 9 %}" + RANGES + "{% endif %}{% endfor %}"
    )
    text = ModelTokenizer(model_files(template=slow), impatient)
    large = [{"role": "user", "content": "x" * SMALL_REQUEST_BYTES * 8}]
    for _ in range(3):
        with pytest.raises(TemplateBudgetError):
            await text.encode_chat(large)
    assert text.chat_fault == ""
    assert await text.encode_chat(HI) == []


def test_template_that_exhausts_its_compiler_refuses_only_chats(
    impatient: TemplateProcess,
) -> None:
    deep = "{% if a %}" * 5000 + "{% endif %}" * 5000
    text = ModelTokenizer(model_files(template=deep), impatient)
    assert text.chat_fault.startswith("tokenizer_config.json: the chat template does not compile")


async def test_rendering_keeps_unicode_and_lone_surrogates() -> None:
    for content in ("é 🌍 日本", "\ud800", "\x00"):
        prompt = await template_process().render("{{ content }}", {"content": content})
        assert prompt == content


async def test_missing_interpreter_is_no_fault_of_the_template(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    templates = TemplateProcess()
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(TemplateProcessError, match="No such file"):
        await templates.render("a", {})
    monkeypatch.undo()
    assert await templates.render("a", {}) == "a"
    templates.close()


def test_environment_of_the_child_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    environment = child_environment()
    assert "HF_TOKEN" not in environment
    assert environment["TZ"] == "Asia/Tokyo"


def test_child_ends_when_its_gateway_is_killed() -> None:
    """The gateway is a script here, with the only other end of the child's connection."""
    script = (
        "import sys; from modelswarm_gateway.models.template_process import TemplateProcess\n"
        "templates = TemplateProcess(cpu_seconds=600)\n"
        "templates.check('a'); print('ready', flush=True); templates.check(sys.stdin.read())\n"
    )
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as gateway:
        assert gateway.stdout is not None
        assert gateway.stdout.readline() == b"ready\n"
        (child,) = children_of(gateway.pid)
        gateway.kill()
    eventually("the end of the child", lambda: child not in running_processes())


def children_of(pid: int) -> list[int]:
    return [child for child, parent in running_processes().items() if parent == pid]


def running_processes() -> dict[int, int]:
    """Return the parent of each process, without unreaped ones."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # the process has just ended
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(stat.parent.name)] = int(parent)
    return found
