"""The README's quickstart for a cluster is that of docs/kubernetes.md, which `test_end_to_end` runs word for word."""

from __future__ import annotations

import re

from support.kubernetes.quickstart import BLOCKS, ROOT, blocks


def test_every_command_of_the_readme_is_one_that_the_quickstart_has_in_this_order() -> None:
    section = (ROOT / "README.md").read_text().split("## On Kubernetes\n")[1].split("\n## ")[0]
    lines = "".join(re.findall(r"```bash\n(.*?)```", section, re.DOTALL)).splitlines()
    assert lines
    run = [line for text in blocks().values() for line in text.splitlines()]
    assert [line for line in run if line in lines] == lines


def test_the_page_has_the_blocks_that_the_tests_name() -> None:
    assert tuple(blocks()) == BLOCKS
