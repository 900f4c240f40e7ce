"""The README's way to a cluster is the one of docs/kubernetes.md, which tests/cluster runs word for word."""

from __future__ import annotations

import re

from cluster.quickstart import ROOT, blocks


def test_every_line_of_the_readme_is_one_that_the_quickstart_has_in_this_order() -> None:
    section = (ROOT / "README.md").read_text().split("## On Kubernetes\n")[1].split("\n## ")[0]
    (shown,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    whole = "".join(blocks().values()).splitlines()
    lines = shown.splitlines()
    assert lines
    assert [line for line in whole if line in lines] == lines
