"""docs/models.md lists the families of the table, and docs/reference/adding-a-model-family.md is short."""

from __future__ import annotations

from tools.ci.make_model_page import PAGE, replace_table


def test_page_of_models_has_the_table_of_families() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == replace_table(text), "run python tools/ci/make_model_page.py"


def test_page_about_a_new_family_needs_few_lines() -> None:
    lines = (
        (PAGE.parent / "reference" / "adding-a-model-family.md")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    assert len(lines) < 70
