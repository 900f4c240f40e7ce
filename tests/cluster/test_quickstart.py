"""The README's quickstart for a cluster is that of docs/kubernetes.md, which `test_end_to_end.py` runs."""

from __future__ import annotations

import re

from cluster.quickstart import BLOCKS, ROOT, blocks

README = (ROOT / "README.md").read_text()


def test_every_command_of_the_readme_is_one_that_the_end_to_end_tests_run() -> None:
    section = README.split("## On Kubernetes\n")[1].split("\n## ")[0]
    shown = "".join(re.findall(r"```bash\n(.*?)```", section, re.DOTALL)).splitlines()
    run = [line for text in blocks().values() for line in text.splitlines()]
    assert shown
    assert [line for line in shown if line not in run] == []


def test_the_page_has_the_blocks_that_the_tests_name() -> None:
    assert tuple(blocks()) == BLOCKS
