"""Regenerate the protobuf modules (`make proto`) of every .proto in modelswarm/protocol/wire.

Run by developers after a change of a .proto; the results are committed, so that users need no
compiler. Each file gets a _pb2.py and a _pb2.pyi; one that declares a service a _pb2_grpc.py too.
"""

from __future__ import annotations

import re
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc  # type: ignore[import-untyped]

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "modelswarm" / "protocol" / "wire"


def protoc_arguments(proto: Path) -> list[str]:
    bin_ = Path(sys.executable).parent
    plugins = [f"--plugin={bin_ / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")]
    out = [f"--python_out={ROOT}", *plugins, f"--mypy_out=quiet:{ROOT}"]
    if re.search(r"^service ", proto.read_text(), re.MULTILINE):
        out += [f"--grpc_python_out={ROOT}", f"--mypy_grpc_out=quiet:{ROOT}"]
    return ["protoc", f"-I{ROOT}", f"-I{files('grpc_tools') / '_proto'}", *out, str(proto)]


def main() -> int:
    for proto in sorted(PROTOS.glob("*.proto")):
        if protoc.main(protoc_arguments(proto)) != 0:
            print(f"protoc failed on {proto.name}", file=sys.stderr)
            return 1
        print(f"{proto.relative_to(ROOT)} -> {proto.stem}_pb2.py")
    return 0


if __name__ == "__main__":
    sys.exit(main())
