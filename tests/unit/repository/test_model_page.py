"""docs/models.md lists the families of the table, and docs/reference/adding-a-model-family.md is short."""

from __future__ import annotations

from support.models.tiny_models import FUSED, TINY

from tools.ci.make_model_page import PAGE, render_table, replace_table


def test_page_of_models_has_the_table_of_families() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == replace_table(text), "run python tools/ci/make_model_page.py"


def test_speeds_are_those_of_the_familys_small_model() -> None:
    figures = {
        f"{name}_b{rows}": rows + place / 100 for rows in (1, 8) for place, name in enumerate(TINY)
    }
    figures |= {f"{name}_generic_b{rows}": 0.5 for rows in (1, 8) for name in FUSED}
    table = render_table({"commit": "c", "machine": "m", "shape": "s", "figures": figures})
    assert "at c, s, one thread of m." in table.splitlines()[0]
    for line, speeds, generic in (
        ("| `llama` | ", "| 1.00 / 8.00 |", "| 0.50 / 0.50 |"),
        ("| `gemma3_text` | ", "| 1.05 / 8.05 |", "| 0.50 / 0.50 |"),
        ("| `mixtral` | ", "| 1.06 / 8.06 |", "| – |"),
    ):
        (row,) = (each for each in table.splitlines() if each.startswith(line))
        assert speeds in row and generic in row


def test_page_about_a_new_family_needs_few_lines() -> None:
    lines = (
        (PAGE.parent / "reference" / "adding-a-model-family.md")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    assert len(lines) < 70
