"""`modelswarm batch` over 10,000 lines: lines per second, and the growth of its memory.

Real processes: two servers of the hash model, which computes almost nothing, a gateway, and the command. The growth is
a slope, from half of the lines to the end; it leaves out what the first half takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.processes.swarm import MODEL, two_spans

from bench.harness import Bar, Result

LINES, TOKENS, CONCURRENCY = 10_000, 4, 16
MOST_BYTES = (
    400.0  # per line: a digest of 49 bytes, its places in a growing set, pages of the allocator
)
LIMIT_SECONDS = 1800.0
POLL_SECONDS = 0.2


def run() -> Result:
    with tempfile.TemporaryDirectory() as folder, two_spans(Path(folder)) as swarm:
        source, target = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
        source.write_text("".join(_line(number) for number in range(LINES)), encoding="utf-8")
        url = swarm.gateway().url
        began = time.perf_counter()
        half_mib, peak_mib = _run_batch(source, target, url)
        seconds = time.perf_counter() - began
        _check_output(target)
    figures = {
        "lines_per_second": LINES / seconds,
        "half_mib": half_mib,
        "bytes_per_line": (peak_mib - half_mib) * (1 << 20) / (LINES / 2),
        "load": os.getloadavg()[0],
    }
    return Result(
        name="batch_10k",
        figures=figures,
        columns=("lines/s", "MiB after half of the lines", "further bytes per line"),
        rows=[
            (
                f"{figures['lines_per_second']:.0f}",
                f"{half_mib:.1f}",
                f"{figures['bytes_per_line']:.0f}",
            )
        ],
        shape=f"{LINES} lines of {TOKENS} tokens, {CONCURRENCY} at a time, two servers of the hash model",
        threads=1,
        bars=[Bar("bytes_per_line", "<=", MOST_BYTES)],
    )


def _line(number: int) -> str:
    body = {"model": MODEL, "prompt": f"line {number}", "max_tokens": TOKENS, "ignore_eos": True}
    request = {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/completions"}
    return json.dumps(request | {"body": body}) + "\n"


def _run_batch(source: Path, target: Path, url: str) -> tuple[float, float]:
    """Run the command; return its largest resident MiB up to half of the lines, and up to the end."""
    flags = ("-o", str(target), "--url", url, "--concurrency", str(CONCURRENCY))
    command = (sys.executable, "-m", "modelswarm.cli", "batch", str(source), *flags)
    half = None
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        status = Path(f"/proc/{process.pid}/status")
        deadline, peak = time.monotonic() + LIMIT_SECONDS, 0.0
        half_bytes = 0
        while process.poll() is None:
            if time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"the batch was not done within {LIMIT_SECONDS:g} s")
            peak = max(peak, _resident_mib(status))
            size = target.stat().st_size if target.exists() else 0
            half_bytes = half_bytes or _bytes_of_half(target, size)
            if half is None and half_bytes and size >= half_bytes:
                half = peak
            time.sleep(POLL_SECONDS)
    if process.returncode or half is None:
        raise RuntimeError(f"the batch ended with exit code {process.returncode}")
    return half, peak


def _bytes_of_half(target: Path, size: int) -> int:
    """Return about the bytes of half of the output, by its first line; 0 if there is none yet."""
    if not size:
        return 0
    with target.open("rb") as file:
        return len(file.readline()) * LINES // 2


def _resident_mib(status: Path) -> float:
    """Return the largest resident size of a process so far; 0 if it has ended."""
    try:
        lines = status.read_text().splitlines()
    except OSError:
        return 0.0
    found = [line for line in lines if line.startswith("VmHWM:")]
    return int(found[0].split()[1]) / 1024 if found else 0.0


def _check_output(target: Path) -> None:
    """Raise unless every line is answered once."""
    with target.open(encoding="utf-8") as file:
        facts = [json.loads(line) for line in file]
    found = {line["custom_id"] for line in facts if line["response"]["status_code"] == 200}
    if len(found) != LINES or len(facts) != LINES:
        raise RuntimeError(
            f"{len(found)} of {LINES} lines were answered, {len(facts)} were written"
        )
