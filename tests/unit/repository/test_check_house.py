"""Each house rule is broken on purpose, and check_house.py reports it."""

from __future__ import annotations

from pathlib import Path
from textwrap import indent

import pytest

from tools.ci.check_house import (
    CODE_WORDS,
    FILE_LINES,
    FUNCTION_LINES,
    PAGE_WORDS,
    PRIVATE_WORDS,
    TEST_NAME,
    bare_rules,
    crowded_folders,
    long_comment_sentences,
    long_docstring_sentences,
    long_files,
    long_functions,
    long_sentences,
    long_test_names,
    markdown_pages,
    overloaded_methods,
    private_words,
    question_docstrings,
)


def _write(folder: Path, name: str, text: str) -> list[Path]:
    path = folder / name
    path.write_text(text)
    return [path]


def _function(docstring: str) -> str:
    body = docstring.replace("\n", "\n    ")
    return f'def f() -> None:\n    """{body}"""\n'


@pytest.mark.parametrize("name", ["x.py", "x.yaml", "x"])
def test_folder_of_15_entries_is_reported(name: str) -> None:
    folder = [Path("folder") / f"{n}{name}" for n in range(15)]

    assert list(crowded_folders(folder)) == ["folder: 15 entries; at most 14"]


def test_root_and_package_files_are_not_counted() -> None:
    root = [Path(f"{n}") for n in range(15)]
    package = [Path("package") / name for name in ("__init__.py", "py.typed", "conftest.py")]
    modules = [Path("package") / f"{n}.py" for n in range(14)]

    assert list(crowded_folders([*root, *package, *modules])) == []


def test_page_of_any_folder_is_read_but_others_words() -> None:
    files = ["README.md", "docs/a.md", "docs/deeper/b.md", "tools/c.md", "x.py"]
    others = Path("tests/petals_examples.md")

    assert markdown_pages([*map(Path, files), others]) == [Path(name) for name in files[:-1]]


def test_file_with_too_many_lines_is_reported(tmp_path: Path) -> None:
    assert list(long_files(_write(tmp_path, "a.py", "\n" * FILE_LINES))) == []
    [found] = long_files(_write(tmp_path, "b.py", "\n" * (FILE_LINES + 1)))
    assert found.endswith(f"{FILE_LINES + 1} lines; at most {FILE_LINES}")


def test_function_with_too_many_lines_is_reported(tmp_path: Path) -> None:
    most = "def f() -> None:\n" + "    x = 1\n" * (FUNCTION_LINES - 1)
    assert list(long_functions(_write(tmp_path, "a.py", most))) == []
    [found] = long_functions(
        _write(tmp_path, "b.py", "class C:\n" + indent(most + "    y = 1\n", "    "))
    )
    assert found.endswith(f"b.py:2: f has {FUNCTION_LINES + 1} lines; at most {FUNCTION_LINES}")


@pytest.mark.parametrize(("name", "count"), [("leave", 1), ("_leave", 1), ("__len__", 0)])
def test_method_of_six_classes_is_reported(tmp_path: Path, name: str, count: int) -> None:
    classes = [f"class C{n}:\n    def {name}(self) -> None: ..." for n in range(6)]
    paths = _write(tmp_path, "module.py", "\n".join(classes))

    assert len(list(overloaded_methods(paths))) == count


def test_long_name_of_a_test_is_reported(tmp_path: Path) -> None:
    name = "test_" + "x" * (TEST_NAME - 5)
    both = f"def {name}() -> None: ...\nasync def {name}x() -> None: ...\n"
    [found] = long_test_names(_write(tmp_path, "test_a.py", both))
    assert f":2: {name}x has" in found


@pytest.mark.parametrize(
    "docstring",
    [
        "What this is.",
        "whether it runs.",
        "Where it runs.",
        "When it runs.",
        "Of its servers, the first.",
        "`x`: who runs it.",
        "`Server.x`: Which one.",
    ],
)
def test_question_docstring_is_reported(tmp_path: Path, docstring: str) -> None:
    module = _write(tmp_path, "module.py", f'"""{docstring}"""\n')
    function = _write(tmp_path, "function.py", _function(docstring))

    assert len(list(question_docstrings([*module, *function]))) == 2


@pytest.mark.parametrize("docstring", ["What this is.", "word " * 26])
def test_docstring_below_a_constant_is_read(tmp_path: Path, docstring: str) -> None:
    constant = f'X = 1\n"""{docstring}"""\n'
    field = indent(constant.replace("X = 1", "x: int = 1"), "    ")
    paths = _write(tmp_path, "f.py", f"{constant}\n\nclass C:\n{field}")

    assert len([*question_docstrings(paths), *long_docstring_sentences(paths)]) == 2


@pytest.mark.parametrize("docstring", ["Whiteness of x.", "`x`: the servers who run.", "Offers x."])
def test_subject_first_docstring_is_accepted(tmp_path: Path, docstring: str) -> None:
    assert list(question_docstrings(_write(tmp_path, "f.py", _function(docstring)))) == []


@pytest.mark.parametrize(
    "text",
    [
        "word " * 26,
        "First.\n\n" + "word " * 26,
        "First.\n\n- " + "word " * 13 + "\n  " + "word " * 13,
        "word " * 13 + "e.g. " + "word " * 13,
    ],
)
def test_long_docstring_sentence_is_reported(tmp_path: Path, text: str) -> None:
    paths = _write(tmp_path, "f.py", _function(text + "."))

    found = list(long_docstring_sentences(paths))

    assert len(found) == 1
    assert f"at most {CODE_WORDS}" in found[0]


@pytest.mark.parametrize(
    "text",
    [
        "word " * 24 + "end. " + "word " * 24 + "end.",
        "First:\n\n" + "\n".join("- " + "word " * 9 for _ in range(5)),
        "First:\n\n" + "\n".join("name      " + "word " * 9 for _ in range(5)),
        "First:\n\n" + "    word word word\n" * 10 + "\nLast.",
    ],
)
def test_list_table_or_example_is_accepted(tmp_path: Path, text: str) -> None:
    assert list(long_docstring_sentences(_write(tmp_path, "f.py", _function(text)))) == []


@pytest.mark.parametrize("lines", [["word " * 26], ["word " * 13, "word " * 13]], ids=len)
def test_long_sentence_of_a_comment_is_reported(tmp_path: Path, lines: list[str]) -> None:
    comment = "".join(f"    # {line}\n" for line in lines)
    paths = _write(tmp_path, "f.py", f"def f() -> None:\n{comment}    return\n")

    [found] = long_comment_sentences(paths)

    assert found.startswith(f"{paths[0]}:2: ")
    assert f"at most {CODE_WORDS}" in found


def test_comments_of_short_sentences_are_accepted(tmp_path: Path) -> None:
    short = "# " + "word " * 24 + "end.\n"
    text = short * 2 + "x = 1  # " + "word " * 13 + "\n# " + "word " * 13 + "\n"

    assert list(long_comment_sentences(_write(tmp_path, "f.py", text))) == []


@pytest.mark.parametrize(
    "text",
    [
        "word " * 36 + ".\n\nA short one.\n",
        "word " * 18 + "i.e. " + "word " * 18,
        "1. " + "word " * 36,
        "| a | b |\n|---|---|\n| short | " + "word " * 36 + "|\n",
    ],
)
def test_long_sentence_of_a_page_is_reported(tmp_path: Path, text: str) -> None:
    found = list(long_sentences(_write(tmp_path, "page.md", text)))

    assert len(found) == 1
    assert f"at most {PAGE_WORDS}" in found[0]


def test_short_cells_and_list_items_are_accepted(tmp_path: Path) -> None:
    row = "| " + " | ".join(["word " * 12] * 4) + " |\n"
    items = "".join(f"{n}. " + "word " * 30 + "\n" for n in range(3))

    assert list(long_sentences(_write(tmp_path, "page.md", row * 3 + "\n" + items))) == []


@pytest.mark.parametrize("word", PRIVATE_WORDS)
def test_private_word_is_reported_with_its_line(tmp_path: Path, word: str) -> None:
    name = word.replace(" ", "_")
    text = f"x = 1  # Here {word.capitalize()} waits.\n{word.split()[0]}_count = '{name}'\n"
    paths = _write(tmp_path, "module.py", text)

    assert f"{paths[0]}:1: the word {word.capitalize()!r}" in list(private_words(paths))


@pytest.mark.parametrize(
    "text", ["wish_list", "Verdicts", "_NOBODY", "of\nlate", "wishes", "wished", "of\n# late"]
)
def test_form_of_a_private_word_is_reported(tmp_path: Path, text: str) -> None:
    assert len(list(private_words(_write(tmp_path, "module.py", text)))) == 1


def test_word_with_a_private_word_inside_is_accepted(tmp_path: Path) -> None:
    text = "swishing of latency, of lateness, in vaingloriousness, of courses"

    assert list(private_words(_write(tmp_path, "module.py", text))) == []


@pytest.mark.parametrize("number", [13, 18])
def test_rule_without_its_name_is_reported(tmp_path: Path, number: int) -> None:
    paths = _write(tmp_path, "module.py", f"# A copy of a hop\n# waits (R{number}).\n")

    assert list(bare_rules(paths)) == [f"{paths[0]}:2: the rule (R{number}) without its name"]


def test_list_of_rules_without_their_names_is_reported(tmp_path: Path) -> None:
    paths = _write(tmp_path, "module.py", f"# Fences of a hop (R{2}, R{3}: fences).\n")

    assert list(bare_rules(paths)) == [f"{paths[0]}:1: the rules R{2}, R{3} without their names"]


@pytest.mark.parametrize("text", ["a copy (R13, migration)", "migration (R13)", "Migrations (R13)"])
def test_rule_with_its_name_is_accepted(tmp_path: Path, text: str) -> None:
    assert list(bare_rules(_write(tmp_path, "module.py", f"# {text}\n"))) == []
