"""Write the Grafana dashboard that the chart delivers.

    python tools/make_dashboard.py

The rows are in `dashboard/rows.py`. The result is committed; a test compares it with this program's output.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # run as a script, `tools` is not found otherwise

from tools.dashboard.parts import dashboard  # noqa: E402
from tools.dashboard.rows import ROWS, variables  # noqa: E402

TARGET = ROOT / "charts" / "modelswarm" / "dashboards" / "modelswarm.json"
DESCRIPTION = "Requests, recoveries, coverage and pods of ModelSwarm."


def render_dashboard() -> str:
    made = dashboard("ModelSwarm", DESCRIPTION, ROWS, variables())
    return json.dumps(made, indent=2, sort_keys=True) + "\n"


def main() -> int:
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(render_dashboard(), encoding="utf-8")
    print(f"{TARGET.relative_to(ROOT)}: {len(ROWS)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
