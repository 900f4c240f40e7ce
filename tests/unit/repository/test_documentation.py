"""Documents name files that exist, and the standard terms of the field lead to the code that implements them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tools.ci.check_house import (
    crowded_folders,
    long_sentences,
    overloaded_methods,
    parsed,
    question_docstrings,
    tracked,
)

ROOT = Path(__file__).parents[3]
PAGES = [
    ROOT / "README.md",
    ROOT / "AGENTS.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
TOPS = (
    "modelswarm",
    "gateway",
    "serving",
    "operator",
    "tests",
    "tools",
    "bench",
    "charts",
    "crds",
    "docs",
    "examples",
    "images",
)
CODE = re.compile(r"`([^`\n]+)`")
TERMS = {
    "outlier detection": "gateway/modelswarm_gateway/core/detection",
    "live migration": "gateway/modelswarm_gateway/core/migration",
    "failure detector": "gateway/modelswarm_gateway/core/detection",
    "KV transfer": "serving/modelswarm_serving/core/kv",
    "chat template": "gateway/modelswarm_gateway/models",
    "leader election": "operator/modelswarm_operator/kube",
    "informer cache": "operator/modelswarm_operator/informer",
    "rollout": "operator/modelswarm_operator/reconcile/pods",
    "failover": "gateway/modelswarm_gateway/api",
    "session takeover": "gateway/modelswarm_gateway/core/takeover",
}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_every_path_in_a_document_exists(page: Path) -> None:
    words = {
        word.rstrip("/.,:")
        for code in CODE.findall(page.read_text(encoding="utf-8"))
        for word in code.split()
    }
    paths = [
        word
        for word in words
        if word.split("/")[0] in TOPS and "/" in word and re.fullmatch(r"[\w./-]+", word)
    ]
    files = [
        word
        for word in paths
        if re.search(r"\.(py|md|yaml|proto|json|toml|svg|txt)$", word)
        or (ROOT / word.split("/")[0]).is_dir()
    ]

    missing = [path for path in files if not (ROOT / path).exists() and not _is_image(path)]

    assert missing == []


def _is_image(path: str) -> bool:
    """Return True for the name of a container image, such as `modelswarm/operator`."""
    return path in {
        "modelswarm/operator",
        "modelswarm/gateway",
        "modelswarm/server",
        "modelswarm/server-slim",
        "modelswarm/counting",
    }


def test_every_file_name_in_the_architecture_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = {name for code in CODE.findall(text) for name in re.findall(r"[\w/]+\.py\b", code)}

    assert len(names) > 30
    assert _find_unknown(names) == []


def test_every_file_name_in_a_docstring_exists() -> None:
    named = {
        f"{path}: {name}": name
        for path in tracked("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module)
        for code in CODE.findall(ast.get_docstring(node) or "")
        for name in re.findall(r"[\w/]+\.py\b", code)
    }

    assert len(named) > 30
    unknown = _find_unknown(set(named.values()))
    assert [place for place, name in named.items() if name in unknown] == []


def _find_unknown(names: set[str]) -> list[str]:
    """Return the file names, or ends of paths, that no Python file of this checkout has."""
    known = [f"/{path}" for path in tracked("*.py")]
    return [name for name in sorted(names) if not any(path.endswith(f"/{name}") for path in known)]


@pytest.mark.parametrize(("term", "folder"), TERMS.items(), ids=TERMS)
def test_standard_term_leads_to_its_code(term: str, folder: str) -> None:
    pattern = re.compile(r"[\s_-]+".join(map(re.escape, term.split())), re.IGNORECASE)
    files = [
        path
        for path in (ROOT / folder).rglob("*.py")
        if pattern.search(path.read_text(encoding="utf-8"))
    ]

    assert files, f"{term!r} does not occur in {folder}"


def test_departure_from_the_house_rules_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("word " * 36 + ".\n\nA short one.\n")
    module = tmp_path / "module.py"
    classes = [f"class C{n}:\n    def leave(self) -> None: ..." for n in range(6)]
    module.write_text('"""What this is."""\n' + "\n".join(classes))
    folder = [Path("folder") / f"{n}.py" for n in range(15)]

    assert len(list(long_sentences([page]))) == 1
    assert len(list(question_docstrings([module]))) == 1
    assert len(list(overloaded_methods([module]))) == 1
    assert list(crowded_folders(folder)) == ["folder: 15 entries; at most 14"]
