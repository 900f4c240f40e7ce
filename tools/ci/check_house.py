"""Check the house rules that a linter does not know: folder sizes, method names, docstrings, sentences of docs.

Run by `make check`; prints each departure with its place and exits with 1 when there is one. The rules are in
AGENTS.md. Reads only files that git tracks, or would track.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("modelswarm", "gateway", "serving", "operator")
FOLDER_ENTRIES = 14  # a reader takes in no more at a glance
CLASSES_PER_METHOD = 5  # unrelated classes that may define one public method name
SENTENCE_WORDS = 35  # in README and docs
NO_ENTRY = ("__init__.py", "py.typed", "conftest.py")
COMMON_METHODS = {
    *("run", "close", "start", "stop", "main", "setup"),
    *("forward", "encode", "decode", "parse", "update"),
}
QUESTION = re.compile(r"(Who|Whom|Whose|What|Whether|Which|How|Why|Of|Its)\b")


def main() -> int:
    python = tracked("*.py")
    product = [path for path in python if path.parts[0] in PRODUCT]
    found = [
        *crowded_folders(python),
        *overloaded_methods(product),
        *question_docstrings(product),
        *long_sentences([Path("README.md"), *tracked("docs/*.md")]),
    ]
    for line in found:
        print(line)
    return 1 if found else 0


def tracked(pattern: str) -> list[Path]:
    """Files of this checkout that match, without generated protobuf modules; relative to the root."""
    command = ["git", "ls-files", "-co", "--exclude-standard", pattern]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [Path(name) for name in names.split() if "_pb2" not in name]
    return [path for path in paths if (ROOT / path).is_file()]


def crowded_folders(paths: list[Path]) -> Iterator[str]:
    entries: dict[Path, set[str]] = defaultdict(set)
    for path in paths:
        for inside in (path, *path.parents):
            if inside.parent != inside and inside.name not in NO_ENTRY:
                entries[inside.parent].add(inside.name)
    for folder, names in sorted(entries.items()):
        if len(names) > FOLDER_ENTRIES:
            yield f"{folder}: {len(names)} entries; at most {FOLDER_ENTRIES}"


def overloaded_methods(paths: list[Path]) -> Iterator[str]:
    owners: dict[str, set[str]] = defaultdict(set)
    for path in paths:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                        owners[each.name].add(f"{path}:{node.name}")
    for name, classes in sorted(owners.items()):
        if name.startswith("_") or name in COMMON_METHODS:
            continue
        if len(classes) > CLASSES_PER_METHOD:
            where = ", ".join(sorted(classes))
            yield f"method {name}: {len(classes)} classes; at most {CLASSES_PER_METHOD}: {where}"


def question_docstrings(paths: list[Path]) -> Iterator[str]:
    """Docstrings that begin with a question word instead of a subject or a verb."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    for path in paths:
        for node in ast.walk(parsed(path)):
            if isinstance(node, kinds) and QUESTION.match(ast.get_docstring(node) or ""):
                line = getattr(node, "lineno", 1)
                yield f"{path}:{line}: the docstring begins with a question word"


def long_sentences(pages: list[Path]) -> Iterator[str]:
    """Sentences of prose; tables, headings and code blocks do not count."""
    for page in pages:
        text = re.sub(r"```.*?```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
        lines = [each for each in text.splitlines() if not each.lstrip().startswith(("|", "#"))]
        for sentence in re.split(r"(?<=[.!?])\s+|\n\s*\n|\n\s*[-*] ", "\n".join(lines)):
            words = sentence.split()
            if len(words) > SENTENCE_WORDS:
                yield f"{page}: a sentence of {len(words)} words: {' '.join(words)[:80]} ..."


def parsed(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
