"""The mutants of tools/ci/mutate.py: the kinds of edits, and the choice of a sample."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.ci import mutate

GROUP = mutate.GROUPS[0]


def edits_of(source: str) -> set[tuple[str, str]]:
    """Return (old text, new text) of every mutant of a function body."""
    body = "".join(f"    {line}\n" for line in source.splitlines())
    text = f"def f(a, b, log):\n{body}".encode()
    return {(m.old, m.new) for m in mutate.mutants_of_file(GROUP, "x.py", text)}


@pytest.mark.parametrize(
    ("source", "edit"),
    [
        ("return a < b", ("a < b", "a <= b")),
        ("return a is None", ("a is None", "a is not None")),
        ("return a and b", ("a and b", "((a) or (b))")),
        ("return not a", ("not a", "(a)")),
        ("if a:\n    return b", ("a", "not (a)")),
        ("return [x for x in a if x]", ("x", "not (x)")),
        ("return a + b", ("a + b", "(a - b)")),
        ("return 7", ("7", "8")),
        ("return True", ("True", "False")),
        ("return min(a, b)", ("min(a, b)", "max(a, b)")),
        ("a.clear()", ("a.clear()", "pass")),
        ("a.b = 1", ("a.b = 1", "pass")),
        ("a += b", ("a += b", "pass")),
    ],
)
def test_expression_or_statement_has_its_mutant(source: str, edit: tuple[str, str]) -> None:
    assert edit in edits_of(source)


@pytest.mark.parametrize(
    "source", ["log.info('x', 1)", "'docstring'", "assert a", "raise ValueError(a + 1)", "pass"]
)
def test_statement_without_behaviour_has_no_mutant(source: str) -> None:
    assert edits_of(source) == set()


def test_every_mutant_of_a_sample_compiles_and_changes_its_file() -> None:
    sample = mutate.draw(40, seed=3)
    for mutant in sample:
        source = (mutate.ROOT / mutant.path).read_bytes()
        assert source[mutant.start : mutant.end].decode() == mutant.old
        changed = source[: mutant.start] + mutant.new.encode() + source[mutant.end :]
        compile(changed, mutant.path, "exec")
        assert changed != source
    assert len(sample) == 40


def test_sample_takes_equal_shares_of_the_groups() -> None:
    sample = mutate.draw(12, seed=1)
    counts = {group.name: sum(m.group is group for m in sample) for group in mutate.GROUPS}
    assert set(counts.values()) == {3}
    assert sample == mutate.draw(12, seed=1)
    assert sample != mutate.draw(12, seed=2)


def test_reasons_are_read_by_place_and_edit(tmp_path: Path) -> None:
    file = tmp_path / "mutants.toml"
    file.write_text(
        '[[survivor]]\npath = "a.py"\nfunction = "f"\nold = "1"\nnew = "2"\nreason = "equal"\n'
    )
    assert mutate.read_reasons(file) == {("a.py", "f", "1", "2"): "equal"}


def test_known_survivors_still_stand_in_the_code() -> None:
    existing = {
        (m.path, m.function, m.old, m.new)
        for group in mutate.GROUPS
        for m in mutate.mutants_of_group(group)
    }
    assert set(mutate.read_reasons(mutate.SURVIVORS)) <= existing
