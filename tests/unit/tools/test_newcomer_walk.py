"""The newcomer's walk: it finds the README's commands, has a step for each, and checks their output."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tools.ci.make_venv import GIGABYTE, obstacle
from tools.ci.newcomer.checks import check_demo, check_stream, counts, refuses
from tools.ci.newcomer.readme import Command, commands, documents, section_at
from tools.ci.newcomer.report import Report, Row
from tools.ci.newcomer.steps import STEPS, Step, UnknownCommandError, Way, plan_walk

README = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
PAGE = """# Name

```
make demo            # four servers
# only a comment
```

```yaml
kind: ModelSwarm
```

## Use it

```bash
curl http://127.0.0.1:8000/v1 -H 'a: #b' \\
  -d '{"x": 1}'
```

```json
{"not": "a command"}
```
"""


def test_commands_are_joined_and_lose_their_comments() -> None:
    assert commands(PAGE) == [
        Command("Name", "make demo"),
        Command("Use it", "curl http://127.0.0.1:8000/v1 -H 'a: #b' -d '{\"x\": 1}'"),
    ]


def test_comment_in_a_code_block_is_no_heading() -> None:
    assert section_at(PAGE, PAGE.index("kind:")) == "Name"


def test_documents_are_yaml_blocks_of_swarms() -> None:
    assert documents(PAGE) == ["kind: ModelSwarm\n"]
    assert len(documents(README)) == 1


def test_every_command_of_the_readme_has_a_step() -> None:
    planned = plan_walk(commands(README))

    assert {step for _, step in planned} == set(STEPS)
    ways = [step.way for _, step in planned]
    assert ways.index(Way.RUN_AS_ROOT) < ways.index(Way.START) < ways.index(Way.TALK)


def test_command_without_a_step_is_reported() -> None:
    with pytest.raises(UnknownCommandError, match="'make coffee' has no step"):
        plan_walk([Command("Use it", "make coffee")])


def test_longest_beginning_chooses_the_step() -> None:
    [(_, step)] = plan_walk([Command("On Kubernetes", "make cluster")])
    assert step.way is Way.ELSEWHERE
    assert step.reason


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.beginning.strip())
def test_step_elsewhere_names_a_file_that_exists(step: Step) -> None:
    named = step.reason.rpartition(": ")[2]
    assert (step.way is Way.ELSEWHERE) == bool(named)
    assert (Path(__file__).parents[3] / named).exists()


@pytest.mark.parametrize("text", ["1 2 4", "1 2 2 3", "1 2", "1 3 2", ""])
def test_lost_or_doubled_number_is_a_fault(text: str) -> None:
    assert counts(1, 3)(f"answer: {text}\n> ")
    assert counts(1, 3)("from 1 to 3.\n1 2\n3\n> ") == ""


def demo_output(answer: str) -> str:
    return (
        f"2. The same again, with a kill in the middle:\n\n{answer}\n   route before: x\n"
        "identical to the run without a failure: yes\n"
    )


def test_demo_is_judged_by_its_numbers_around_the_kill() -> None:
    numbers = [str(number) for number in range(1, 201)]
    kill = "\n*** SIGKILL: counting-s1-r0, pid 7 ***\n"
    whole = " ".join(numbers[:80]) + kill + " ".join(numbers[80:])
    short = " ".join(numbers[:80]) + kill + " ".join(numbers[81:])

    assert check_demo(demo_output(whole)) == ""
    assert "not all there" in check_demo(demo_output(short))
    assert "SIGKILL" in check_demo(demo_output(" ".join(numbers)))


def stream_of(numbers: range, end: str = "data: [DONE]\n") -> str:
    events = [{"choices": [{"delta": {"content": f"{number} "}}]} for number in numbers]
    return "".join(f"data: {json.dumps(event)}\n\n" for event in [*events, {"choices": []}]) + end


def test_stream_is_judged_by_its_numbers_and_end() -> None:
    assert check_stream(stream_of(range(57, 71))) == ""
    assert check_stream(stream_of(range(58, 71)))
    assert check_stream(stream_of(range(57, 71), end=""))


def test_refusal_is_one_sentence_and_no_traceback() -> None:
    check = refuses("ModelSwarm needs Python")
    assert check("ModelSwarm needs\nPython 3.11\nmake: *** Error 1\n") == ""
    assert check("Traceback (most recent call last):\nModelSwarm needs Python")
    assert check("ModelSwarm needs Python\n" + "more\n" * 4)
    assert check("python3: not found")


def test_report_names_faults_and_commands_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report(tmp_path / "new" / "walk.log")
    report.add(Row("make demo", 61.0, 0), "1 2 3")
    report.add(Row("make cluster", 0.0, None, note="runs on the host"))
    was_good = report.is_good
    report.add(Row("make chaos", 2.0, 1, fault="exit code 1 instead of 0"), "wrong")

    assert was_good
    assert not report.is_good
    assert report.summary().startswith("2 commands tried, 1 with a fault, 1 run elsewhere")
    assert "FAULT" in capsys.readouterr().out
    assert "$ make demo\n1 2 3\n" in report.log.read_text()


def test_report_without_rows_is_not_good(tmp_path: Path) -> None:
    assert not Report(tmp_path / "walk.log").is_good


def test_missing_venv_module_is_one_sentence() -> None:
    found = obstacle(has_ensurepip=False, free_bytes=100 * GIGABYTE, has_index=False)
    assert "apt-get install python3." in found
    assert "\n" not in found


@pytest.mark.parametrize(("has_index", "needed"), [(False, 12), (True, 4)])
def test_full_disk_is_named_before_the_download(has_index: bool, needed: int) -> None:
    assert obstacle(True, needed * GIGABYTE, has_index) == ""
    found = obstacle(True, needed * GIGABYTE - 1, has_index)
    assert f"need {needed} GB" in found
    assert ("TORCH_INDEX_URL" in found) is not has_index


def test_make_without_python_says_what_to_install() -> None:
    words = ("make", "--always-make", "setup", "PYTHON=no-such-python")
    root = Path(__file__).parents[3]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, check=False)

    assert done.returncode == 2
    sentence = "ModelSwarm needs Python 3.11 or newer, and no-such-python is not found"
    assert refuses(sentence)(done.stderr) == ""
