"""Check the house rules that a linter does not know: folders, lengths, method names, docstrings, sentences and words.

Run by `make check`; prints each departure with its place and exits with 1 when there is one. The rules are in
AGENTS.md. Reads only files that git tracks, or would track.
"""

from __future__ import annotations

import ast
import gc
import inspect
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("modelswarm", "gateway", "serving", "operator")
TEXTS = ("", ".py", ".md", ".proto", ".yaml", ".tpl", ".txt", ".toml", ".go")
FOLDER_ENTRIES = 14  # a reader takes in no more at a glance
FILE_LINES = 500
FUNCTION_LINES = 60  # with signature and docstring
CLASSES_PER_METHOD = 5  # unrelated classes that may define one method name
PAGE_WORDS = 35  # in a sentence of a Markdown page
CODE_WORDS = 25  # in a sentence of a docstring or of a comment on lines of its own
TEST_NAME = 60  # characters
NO_ENTRY = ("__init__.py", "py.typed", "conftest.py")
LARGE_FOLDERS = {
    ".": "the files of a repository's root have fixed names, and tools look for them there",
}
LONG_FUNCTIONS = {
    "modelswarm/client/pipeline/opening.py:pipeline": "half of it is LMDeploy's arguments, each described",
    "serving/modelswarm_serving/model/attention/triton_kernels.py:attend_tiles": "one kernel is one function",
}
OTHERS_PAGES = {"petals_examples.md"}  # word for word
COMMON_METHODS = {
    *("run", "close", "start", "stop", "main", "setup"),
    *("forward", "encode", "decode", "parse", "update"),
}
QUESTION = re.compile(
    r"(?:`[^`]*`:\s+)?(who|whom|whose|what|whether|which|how|why|where|when|of|its)\b",
    re.IGNORECASE,
)
PRIVATE_WORDS = (
    *("nobody", "whoever", "somebody", "everybody", "anybody"),
    *("of late", "its like", "in vain", "of ours", "wish", "verdict", "door", "patience"),
)
_ANY_WORD = "|".join(PRIVATE_WORDS).replace(" ", r"[\s#]+")
PRIVATE_WORD = re.compile(rf"(?<![A-Za-z])({_ANY_WORD})(?:e?s|ed)?(?![A-Za-z])", re.IGNORECASE)
WITH_PRIVATE_WORDS = {
    "tools/ci/check_house.py": "lists the words",
    "tests/unit/repository/test_check_house.py": "plants the words",
}
RULES = {  # of docs/protocol.md: a part of the name, which stands beside the number
    **{1: "truncate", 2: "fenc", 3: "cut", 4: "freeze", 5: "loop", 6: "replay", 7: "credit"},
    **{8: "parked", 9: "lane", 10: "early", 11: "window", 12: "admission", 13: "migration"},
    **{14: "opaque", 15: "fork", 16: "prefix", 17: "sampling", 19: "lease", 20: "takeover"},
    21: "detect",
}
BARE_RULE = re.compile(r"\(R(\d+)\)")
RULE_LIST = re.compile(r"\bR\d+, R\d+")
BESIDE = 45  # characters before the number
ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|cf)\.(?=\s)")
LIST_ITEM = r"(?:[-*]|\d+\.)\s"
SENTENCE_END = re.compile(rf"(?<=[.!?])\s+|\n\s*\n|\n\s*{LIST_ITEM}")
COMMENT = re.compile(r"(?:^ *#(?: .*)?\n)+", re.MULTILINE)
PREFORMATTED = re.compile(r"^    |\S {2,}\S|^[|+]")  # a line of a table, a drawing or an example
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


def main() -> int:
    gc.disable()  # searches among the nodes of all files took more than half of the time
    files = tracked()
    python = [path for path in files if path.suffix == ".py"]
    found = [
        *crowded_folders(files),
        *long_files(python),
        *long_functions(python),
        *overloaded_methods([path for path in python if path.parts[0] in PRODUCT]),
        *long_test_names([path for path in python if path.parts[0] == "tests"]),
        *question_docstrings(python),
        *long_docstring_sentences(python),
        *long_comment_sentences(python),
        *long_sentences(markdown_pages(files)),
        *private_words([path for path in files if path.suffix in TEXTS]),
        *bare_rules(python),
    ]
    for line in found:
        print(line)
    return 1 if found else 0


def tracked(pattern: str = "*") -> list[Path]:
    """Files of this checkout that match, without generated protobuf modules; relative to the root."""
    command = ["git", "ls-files", "-co", "--exclude-standard", pattern]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in names.splitlines() if "_pb2" not in name]
    return [path for path in paths if (ROOT / path).is_file()]


def markdown_pages(files: list[Path]) -> list[Path]:
    """All Markdown pages of this project, in whatever folder."""
    return [path for path in files if path.suffix == ".md" and path.name not in OTHERS_PAGES]


def crowded_folders(paths: list[Path]) -> Iterator[str]:
    """Folders with too many files and subfolders, whatever their kind."""
    entries: dict[Path, set[str]] = defaultdict(set)
    for path in paths:
        for inside in (path, *path.parents):
            if inside.parent != inside and inside.name not in NO_ENTRY:
                entries[inside.parent].add(inside.name)
    for folder, names in sorted(entries.items()):
        if len(names) > FOLDER_ENTRIES and str(folder) not in LARGE_FOLDERS:
            yield f"{folder}: {len(names)} entries; at most {FOLDER_ENTRIES}"


def long_files(paths: list[Path]) -> Iterator[str]:
    """Python files with too many lines."""
    for path in paths:
        lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        if lines > FILE_LINES:
            yield f"{path}: {lines} lines; at most {FILE_LINES}"


def long_functions(paths: list[Path]) -> Iterator[str]:
    """Functions with too many lines."""
    for path, node in functions(paths):
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if lines > FUNCTION_LINES and f"{path}:{node.name}" not in LONG_FUNCTIONS:
            yield f"{path}:{node.lineno}: {node.name} has {lines} lines; at most {FUNCTION_LINES}"


def functions(paths: list[Path]) -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions and methods, each with its file."""
    for path in paths:
        for node in definitions(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield path, node


def _overrides(method: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(
        isinstance(each, ast.Name) and each.id == "override" for each in method.decorator_list
    )


def overloaded_methods(paths: list[Path]) -> Iterator[str]:
    """Method names, private ones too, that too many classes define. One that overrides a base's is no other method."""
    owners: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        for node in definitions(path):
            if isinstance(node, ast.ClassDef):
                for each in node.body:
                    if not isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                        continue
                    if not _overrides(each):
                        owners[each.name].add(f"{path}:{node.name}")
    for name, classes in sorted(owners.items()):
        if name.startswith("__") or name.lstrip("_") in COMMON_METHODS:
            continue
        if len(classes) > CLASSES_PER_METHOD:
            where = ", ".join(sorted(classes))
            yield f"method {name}: {len(classes)} classes; at most {CLASSES_PER_METHOD}: {where}"


def long_test_names(paths: list[Path]) -> Iterator[str]:
    """Names of tests that a reader does not take in at a glance."""
    for path, node in functions(paths):
        if node.name.startswith("test_") and len(node.name) > TEST_NAME:
            yield f"{path}:{node.lineno}: {node.name} has more than {TEST_NAME} characters"


def question_docstrings(paths: list[Path]) -> Iterator[str]:
    """Docstrings that begin with a question word instead of a subject or a verb."""
    for path, line, text in docstrings(paths):
        if QUESTION.match(text):
            yield f"{path}:{line}: the docstring begins with a question word"


def long_docstring_sentences(paths: list[Path]) -> Iterator[str]:
    """Sentences of docstrings that are too long; tables, drawings and examples do not count."""
    for path, line, text in docstrings(paths):
        lines = ["" if PREFORMATTED.search(each) else each for each in text.splitlines()]
        for sentence in sentences("\n".join(lines), CODE_WORDS):
            yield f"{path}:{line}: a sentence of {sentence}"


def docstrings(paths: list[Path]) -> Iterator[tuple[Path, int, str]]:
    """Each docstring with its file and the line of its definition; also those below a constant or a field."""
    for path in paths:
        for node in definitions(path):
            if text := ast.get_docstring(node):
                yield path, getattr(node, "lineno", 1), text
            for named, each in pairwise(node.body):
                match each:
                    case ast.Expr(value=ast.Constant(value=str(text))):
                        if isinstance(named, ast.Assign | ast.AnnAssign):
                            yield path, named.lineno, inspect.cleandoc(text)


def long_comment_sentences(paths: list[Path]) -> Iterator[str]:
    """Sentences of comments on lines of their own that are too long. A comment behind code is a part of a line."""
    for path in paths:
        text = (ROOT / path).read_text(encoding="utf-8")
        for match in COMMENT.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            comment = re.sub(r"^ *# ?", "", match[0], flags=re.MULTILINE)
            for sentence in sentences(comment, CODE_WORDS):
                yield f"{path}:{line}: a sentence of {sentence}"


def long_sentences(pages: list[Path]) -> Iterator[str]:
    """Sentences of prose and of table cells that are too long; headings and code blocks do not count."""
    for page in pages:
        text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
        lines = [each for each in text.splitlines() if not each.lstrip().startswith("#")]
        for sentence in sentences("\n".join(map(_cells_apart, lines)), PAGE_WORDS):
            yield f"{page}: a sentence of {sentence}"


def _cells_apart(line: str) -> str:
    """Return the line; of a table's row, each cell as a paragraph of its own."""
    if not line.lstrip().startswith("|"):
        return line
    return "\n\n".join(re.split(r"(?<!\\)\|", line)) + "\n"


def sentences(text: str, limit: int) -> Iterator[str]:
    """Return the number of words and the beginning of each sentence with more than `limit` words."""
    for sentence in SENTENCE_END.split(ABBREVIATION.sub(r"\1", text)):
        words = sentence.split()
        if len(words) > limit:
            yield f"{len(words)} words, at most {limit}: {' '.join(words)[:80]} ..."


def private_words(paths: list[Path]) -> Iterator[str]:
    """Vague words in code, comments, names, charts and pages: they name neither an actor nor an event."""
    for path in paths:
        if str(path) in WITH_PRIVATE_WORDS:
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        for match in PRIVATE_WORD.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{path}:{line}: the word {match[0]!r}"


def bare_rules(paths: list[Path]) -> Iterator[str]:
    """Numbers of the protocol's rules in code that stand without their names, as in `(R13, migration)`."""
    for path in paths:
        text = (ROOT / path).read_text(encoding="utf-8")
        for match in BARE_RULE.finditer(text):
            before = text[max(0, match.start() - BESIDE) : match.start()].lower()
            if RULES.get(int(match[1]), "no such rule") not in before:
                line = text.count("\n", 0, match.start()) + 1
                yield f"{path}:{line}: the rule {match[0]} without its name"
        for match in RULE_LIST.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            yield f"{path}:{line}: the rules {match[0]} without their names"


@cache
def definitions(path: Path) -> tuple[Definition, ...]:
    """Return the file's module, classes and functions: one walk over its nodes serves all rules."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return tuple(node for node in ast.walk(tree) if isinstance(node, Definition))


if __name__ == "__main__":
    sys.exit(main())
