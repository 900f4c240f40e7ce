"""The README's quickstart for a cluster is a part of docs/kubernetes.md, which `test_end_to_end` executes."""

from __future__ import annotations

import re

from support.kubernetes.quickstart import BLOCKS, ROOT, blocks


def test_readme_commands_are_quickstart_commands_in_order() -> None:
    section = (ROOT / "README.md").read_text().split("## On Kubernetes\n")[1].split("\n## ")[0]
    lines = "".join(re.findall(r"```bash\n(.*?)```", section, re.DOTALL)).splitlines()
    assert lines
    run = [line for text in blocks().values() for line in text.splitlines()]
    assert [line for line in run if line in lines] == lines


def test_quickstart_page_has_the_tested_blocks() -> None:
    assert tuple(blocks()) == BLOCKS
