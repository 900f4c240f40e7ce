"""Documents name existing files, and the standard terms of the field lead to the code that implements them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.ci.check_house import PRODUCT, definitions, markdown_pages, tracked

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent.relative_to(ROOT)
PAGES = markdown_pages(tracked("*.md"))
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
LINK = re.compile(r"\]\(([^)\s#]*)(?:#([\w-]+))?\)")
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
README_LINES = 150
GATEWAY, SERVING = "gateway/modelswarm_gateway", "serving/modelswarm_serving"
OPERATOR = "operator/modelswarm_operator"
TERMS = {  # all modules of the product whose docstring has the term in its first line
    "outlier detection": [f"{GATEWAY}/core/detection/outlier_detector.py"],
    "failure detector": [f"{GATEWAY}/core/detection/failure_detector.py"],
    "live migration": [
        f"{GATEWAY}/core/migration/migration.py",
        f"{GATEWAY}/core/migration/migrations.py",
    ],
    "session takeover": [f"{GATEWAY}/core/takeover/session_search.py"],
    "failover of a stream": [
        f"{GATEWAY}/api/failover.py",
        f"{GATEWAY}/core/recovery/recovery.py",
    ],
    "chat template": [
        f"{GATEWAY}/models/chat_template.py",
        f"{GATEWAY}/models/tokenizer.py",
        "modelswarm/checkpoint/chat_template.py",
    ],
    "continuous batching": [f"{SERVING}/core/scheduler.py"],
    "admission control": [f"{SERVING}/core/kv/admission.py"],
    "flow control": [f"{SERVING}/core/flow/flow_control.py"],
    "KV transfer": [f"{SERVING}/core/kv/transfer.py"],
    "leader election": [f"{OPERATOR}/kube/leader_election.py"],
    "informer cache": [f"{OPERATOR}/informer/cache.py"],
    "work queue": [f"{OPERATOR}/controller/worker.py"],
    "rolling update": [f"{OPERATOR}/reconcile/pods/rollout.py"],
    "rollout": [f"{OPERATOR}/reconcile/pods/rollout.py"],
}


@pytest.fixture(autouse=True, scope="module")
def no_syntax_trees_afterwards() -> Iterator[None]:
    """Free the trees of all files: 5 million objects make later walks of the collector slow."""
    yield
    definitions.cache_clear()


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_path_in_a_document_exists(page: Path) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    words = {word.rstrip("/.,:") for code in CODE.findall(text) for word in code.split()}
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

    bases = (ROOT, (ROOT / page).parent)
    missing = [path for path in files if not any((base / path).exists() for base in bases)]

    assert [path for path in missing if not _is_image(path)] == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_between_documents_leads_somewhere(page: Path) -> None:
    text = BLOCK.sub("", (ROOT / page).read_text(encoding="utf-8"))
    broken = [
        f"{path}#{heading}"
        for path, heading in LINK.findall(text)
        if not path.startswith(("http:", "https:"))
        if not _leads_somewhere((ROOT / page).parent / path if path else ROOT / page, heading)
    ]

    assert broken == []


def _leads_somewhere(target: Path, heading: str) -> bool:
    """Return True if the file exists, and has the heading, if one is named."""
    if not target.exists() or not heading:
        return target.exists()
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", target.read_text("utf-8")), re.MULTILINE)
    return heading in {re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings}


def test_link_to_a_missing_file_or_heading_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# The `first` one, and more\n```\n# no heading\n```\n")

    assert _leads_somewhere(page, "the-first-one-and-more")
    assert not _leads_somewhere(page, "no-heading")
    assert not _leads_somewhere(tmp_path / "other.md", "")


def _is_image(path: str) -> bool:
    """Return True for the name of a container image, such as `modelswarm/operator`."""
    return path in {
        "modelswarm/operator",
        "modelswarm/gateway",
        "modelswarm/server",
        "modelswarm/server-slim",
        "modelswarm/counting",
    }


def test_readme_is_claim_picture_five_lines_and_one_table() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    before_demo, _, from_demo = text.partition("\nmake demo ")
    five_lines = from_demo.partition("\n```")[0].splitlines()
    claims = re.findall(r"^\*\*.+\*\*$", before_demo, re.MULTILINE)
    tables = re.findall(r"^\|[-| ]+\|$", text, re.MULTILINE)

    assert len(text.splitlines()) <= README_LINES
    assert (len(claims), len(five_lines), len(tables)) == (1, 5, 1)
    assert "timeline.svg" in before_demo
    assert "\n## Out of scope\n" in text


def test_every_file_name_in_the_architecture_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = {name for code in CODE.findall(text) for name in re.findall(r"[\w/]+\.py\b", code)}

    assert len(names) > 30
    assert _find_unknown(names) == []


def test_every_file_name_in_a_docstring_exists() -> None:
    named = {
        f"{path}: {name}": name
        for path in tracked("*.py")
        for node in definitions(path)
        for code in CODE.findall(ast.get_docstring(node) or "")
        for name in re.findall(r"[\w/]+\.py\b", code)
    }

    assert len(named) > 30
    unknown = _find_unknown(set(named.values()))
    assert [place for place, name in named.items() if name in unknown] == []


def test_every_page_that_code_names_exists() -> None:
    pages = {path.name for path in tracked("*.md")}
    named = {
        f"{path}: {name}": name
        for path in tracked("*.py")
        if path.parent != HERE  # whose tests invent names
        for name in re.findall(r"[\w-]+\.md\b", (ROOT / path).read_text(encoding="utf-8"))
    }

    assert len(named) > 30
    assert [place for place, name in named.items() if name not in pages] == []


def _find_unknown(names: set[str]) -> list[str]:
    """Return the file names, or ends of paths, that no Python file of this checkout has."""
    known = [f"/{path}" for path in tracked("*.py")]
    return [name for name in sorted(names) if not any(path.endswith(f"/{name}") for path in known)]


@pytest.mark.parametrize(("term", "modules"), TERMS.items(), ids=TERMS)
def test_standard_term_leads_to_its_module(term: str, modules: list[str]) -> None:
    found = [
        str(path)
        for path in tracked("*.py")
        if path.parts[0] in PRODUCT and path.name != "__init__.py"
        if (text := ast.get_docstring(definitions(path)[0]))
        if term.lower() in text.splitlines()[0].lower()
    ]

    assert found == modules
