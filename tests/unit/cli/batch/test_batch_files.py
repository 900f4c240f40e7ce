"""The files of `batch`: wrong input gets one sentence before anything is sent; an output is only continued."""

from __future__ import annotations

import gc
import json
import resource
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from modelswarm.cli import run
from modelswarm.cli.batch.input_file import check_input, digest, read_requests
from modelswarm.cli.batch.output_file import BatchAnswer, open_output
from modelswarm.cli.batch.progress import ProgressBar
from modelswarm.errors import ModelSwarmError, UserError

NO_GATEWAY = ("--url", "http://127.0.0.1:1")
FINE = BatchAnswer(200, "req", {"text": "x"})
REFUSED = BatchAnswer(400, "req", {"error": {}})


def request(custom_id: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": "p"}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body} | (
        changes
    )


def write_lines(path: Path, lines: Sequence[dict[str, Any] | str]) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "in.jsonl", [request(name) for name in "abc"])


def known(*names: str) -> set[bytes]:
    return {digest(name) for name in names}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"custom_id": "x"', "not JSON (Expecting ',' delimiter, column 18)"),
        ("[1]", "not an object; allowed: custom_id, method, url, body"),
        ('{"custom_id": NaN}', "NaN is not a number of JSON"),
        ("[" * 100_000, "not JSON ("),
        (
            '{"custom_id": "x", "custom_id": "y"}',
            "custom_id: the key is there twice; allowed: once",
        ),
        (
            json.dumps(request("x"))[:-2] + ', "prompt": "q"}}',
            "prompt: the key is there twice; allowed: once in an object",
        ),
        (request("c"), "custom_id: 'c' is that of line 3 too"),
        (request(""), "custom_id: '' is not allowed; allowed: at least 1 character"),
        (request("x", method="GET"), "method: 'GET' is not allowed; allowed: 'POST'"),
        (request("x", url="/v1/embeddings"), "url: '/v1/embeddings' is not allowed; allowed: '/v1"),
        (request("x", body="hi"), "body: 'hi' is not allowed; allowed: an object"),
        (request("x", prio=1), "prio: unknown field; allowed: custom_id, method, url, body"),
        ({"custom_id": "x"}, "method: required; every line has custom_id, method, url, body"),
        (request("x", body={"stream": True}), "body.stream: an answer of a batch comes as a whole"),
        (request("x", body={"append": True}), "body.append: lines of a batch have no order"),
    ],
)
def test_wrong_line_17_is_named_before_anything_is_sent(
    tmp_path: Path, line: dict[str, Any] | str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [*(request(chr(ord("a") + at)) for at in range(16)), line]
    source, target = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"

    assert run(["batch", str(source), "-o", str(target), *NO_GATEWAY]) == 2

    told = capsys.readouterr().err
    assert told.startswith(f"Error: {source}, line 17: ") and sentence in told
    assert len(told.splitlines()) == 1
    assert not target.exists()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda path: path.unlink(), "no such file; allowed: a file with one request"),
        (lambda path: path.write_text("\n\n"), "has no requests; allowed: one JSON object"),
        (lambda path: (path.unlink(), path.mkdir()), "is not a regular file"),
    ],
)
def test_missing_and_empty_inputs_are_one_sentence(
    source: Path,
    change: Callable[[Path], object],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change(source)

    assert run(["batch", str(source), "-o", str(source) + ".out", *NO_GATEWAY]) == 2

    told = capsys.readouterr().err
    assert told.startswith(f"Error: {source}: {sentence}") and len(told.splitlines()) == 1


def test_output_that_cannot_be_one_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for target in (source, tmp_path, tmp_path / "absent" / "out"):
        assert run(["batch", str(source), "-o", str(target), *NO_GATEWAY]) == 2
        assert capsys.readouterr().err.startswith("Error: --output: ")


def test_absent_gateway_is_exit_code_1(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["batch", str(source), "-o", f"{source}.out", *NO_GATEWAY]) == 1
    assert capsys.readouterr().err == "Error: no gateway answers at http://127.0.0.1:1\n"
    assert not Path(f"{source}.out").exists()


def test_facts_have_models_with_their_first_lines(tmp_path: Path) -> None:
    lines: list[dict[str, Any] | str] = [
        request("a"),
        "",
        request("b", body={"model": "n"}),
        request("c", body={}),
    ]

    facts = check_input(write_lines(tmp_path / "in", lines))

    assert facts.ids == known("a", "b", "c")
    assert facts.models == {"m": 1, "n": 3}


def test_torn_last_line_is_cut_and_whole_lines_are_kept(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    whole = FINE.to_line("a") + REFUSED.to_line("b")
    torn = FINE.to_line("c")
    for length in (1, 20, len(torn) - 1):
        target.write_bytes(whole + torn[:length])

        with open_output(target, known("a", "b", "c")) as output:
            assert output.finished == known("a", "b")
            assert output.n_failed == 1
            output.append_answer("c", FINE)

        assert target.read_bytes().startswith(whole)
        ids = [json.loads(line)["custom_id"] for line in target.read_bytes().splitlines()]
        assert ids == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"my notes", "line 1: is not an answer of a batch"),
        (b"my notes\nand more\n", "line 1: is not an answer of a batch"),
        (FINE.to_line("a") + FINE.to_line("z"), "line 2: answers 'z', which the input does not"),
        (FINE.to_line("a") * 2, "line 2: answers 'a', as an earlier line does"),
        (b'{"id": "batch_req_1", "custom_id": "a"}\n', "line 1: is not an answer of a batch"),
    ],
)
def test_file_of_something_else_is_refused_and_unchanged(
    source: Path, tmp_path: Path, content: bytes, sentence: str
) -> None:
    target = tmp_path / "out"
    target.write_bytes(content)

    with pytest.raises(UserError, match=sentence):
        open_output(target, known("a", "b", "c"))

    assert target.read_bytes() == content


def test_failed_lines_are_dropped_when_asked(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    lost = BatchAnswer(error={"code": "timeout", "message": "no answer"})
    target.write_bytes(REFUSED.to_line("a") + FINE.to_line("b") + lost.to_line("c"))

    with open_output(target, known("a", "b", "c")) as output:
        output.drop_failed()
        assert (output.finished, output.n_failed) == (known("b"), 0)
        output.append_answer("a", FINE)

    lines = [json.loads(line) for line in target.read_bytes().splitlines()]
    assert [line["custom_id"] for line in lines] == ["b", "a"]
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == ["out"]


def test_dropped_lines_leave_a_link_and_the_mode_of_its_file(tmp_path: Path) -> None:
    target, link = tmp_path / "real", tmp_path / "out"
    target.write_bytes(REFUSED.to_line("a") + FINE.to_line("b"))
    target.chmod(0o600)
    link.symlink_to(target)

    with open_output(link, known("a", "b")) as output:
        output.drop_failed()
        output.append_answer("a", FINE)

    assert link.is_symlink() and target.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line)["custom_id"] for line in target.read_bytes().splitlines()]
    assert lines == ["b", "a"]


def test_failed_lines_stay_if_none_can_be_run_again(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    content = REFUSED.to_line("a") + FINE.to_line("b") + FINE.to_line("c")
    target.write_bytes(content)

    assert run(["batch", str(source), "-o", str(target), "--retry-failed", *NO_GATEWAY]) == 1

    assert target.read_bytes() == content


def test_lines_have_the_fields_of_openai() -> None:
    answered = json.loads(FINE.to_line("a"))
    lost = json.loads(BatchAnswer(error={"code": "timeout", "message": "no answer"}).to_line("a"))

    assert list(answered) == list(lost) == ["id", "custom_id", "response", "error"]
    assert answered["response"] == {
        "status_code": 200,
        "request_id": "req",
        "body": {"text": "x"},
    }
    assert (lost["response"], lost["error"]["code"]) == (None, "timeout")


def test_second_process_cannot_write_the_same_output(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    with open_output(target, known("a")):
        done = subprocess.run(
            (sys.executable, "-m", "modelswarm.cli", "batch", source, "-o", target, *NO_GATEWAY),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 1
        assert done.stderr == f"Error: {target}: another process writes it; wait for its end\n"
        with pytest.raises(ModelSwarmError, match="another process"):
            open_output(target, known("a"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("-", "-o", "answers"), "INPUT: - is not a file; allowed: a file"),
        (("requests", "-o", "-"), "--output: - is not a file; allowed: a file"),
        (("requests", "-o", "answers", "--timeout", "nan"), "Invalid value for '--timeout'"),
        (("requests", "-o", "answers", "--retry-for", "nan"), "Invalid value for '--retry-for'"),
    ],
)
def test_impossible_arguments_are_refused(
    arguments: tuple[str, ...], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["batch", *arguments, *NO_GATEWAY]) == 2

    assert sentence in capsys.readouterr().err


def test_files_leave_a_few_bytes_of_a_line_in_memory(tmp_path: Path) -> None:
    """A line has 2,000 bytes here, and an answer too. Their digests are kept, in two sets."""
    count = 4000
    long = {"model": "m", "prompt": "p" * 2000}
    lines = [request(f"request-{at}", body=long) for at in range(count)]
    source = write_lines(tmp_path / "in.jsonl", lines)
    del lines
    answer = BatchAnswer(200, "req", {"text": "x" * 2000})
    gc.collect()
    tracemalloc.start()
    try:
        facts = check_input(source)
        with open_output(tmp_path / "out.jsonl", facts.ids) as output:
            for _, each in read_requests(source):
                output.append_answer(each.custom_id, answer)
        with open_output(tmp_path / "out.jsonl", facts.ids) as output:
            gc.collect()
            kept, largest = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(output.finished) == count
    assert kept / count < 400
    assert largest / count < 800  # while a set grows, both its tables are there


def test_full_disk_leaves_the_failed_lines_and_no_copy(tmp_path: Path) -> None:
    target = tmp_path / "out"
    content = REFUSED.to_line("a") + FINE.to_line("b")
    target.write_bytes(content)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_output(target, known("a", "b")) as output:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                output.drop_failed()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert target.read_bytes() == content


def test_progress_is_not_written_into_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CI machines set FORCE_COLOR, with which a file counts as a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ProgressBar(2, 0, 0) as bar:
        bar.count_line(is_ok=True)
    assert capsys.readouterr().err == ""
