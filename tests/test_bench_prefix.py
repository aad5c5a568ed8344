"""The benchmark of the prefix caches runs, and no clock decides whether it passes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
PEERS = ("VLLM_PYTHON", "KVLINT_PYTHON", "KVCACHE_SIMULATOR_PYTHON")
POLICIES = ("lru", "lfu", "fifo", "length-aware")
REPLAYS = [f"{index} {policy}" for index in ("hash", "radix") for policy in POLICIES]
# A peer that knows nothing: it answers in the right form, and so is found to have other rules.
STRANGER = """
import json, sys
asked = json.loads(sys.stdin.read())
names = ("hit_tokens", "evicted_blocks", "cached_blocks", "rejected")
print(json.dumps({"version": "0", "seconds": 1.0, **dict.fromkeys(names, len(asked["names"]))}))
"""


def run(*asked: str, **more: str) -> list[list[str]]:
    """The lines of its tables, as cells."""
    environ = {name: value for name, value in os.environ.items() if name not in PEERS}
    done = subprocess.run(
        [sys.executable, SCRIPTS / "bench_prefix.py", "--quick", *asked],
        capture_output=True, text=True, env=environ | more, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def made(tmp_path: Path, requests: int) -> Path:
    """A made trace of so many requests."""
    path = tmp_path / f"trace{requests}.jsonl"
    script = [sys.executable, SCRIPTS / "bench_traces.py", str(requests)]
    path.write_text(subprocess.run(script, capture_output=True, text=True, check=True).stdout)
    return path


def test_a_quick_run_prints_every_table() -> None:
    cells = run()
    firsts = [line[0] for line in cells]
    assert firsts == [
        "loading", "---", "made",
        "replay", "---", *REPLAYS, *REPLAYS,
        "curve", "---", "made", "made",
        "cache", "---",
        "vLLM: not installed: VLLM_PYTHON=/path/to/python make bench",
        "kvlint: not installed: KVLINT_PYTHON=/path/to/python make bench",
        "whole run", "---",
        "`kvtool prefix --index hash --capacity 10000`",
        "`kvtool prefix --index hash --capacity all`",
        "kvcache-simulator: not installed: KVCACHE_SIMULATOR_PYTHON=/path/to/python make bench",
        "streamed, MB", "---", "0.100", "0.500", "1.001",
    ]  # fmt: skip
    width = 0
    for line, following in zip(cells, [*cells[1:], [""]], strict=True):
        width = len(line) if following[0] == "---" else width
        assert len(line) == width, line


def test_a_trace_is_measured_too_and_a_peer_with_other_answers_has_no_ratio(
    tmp_path: Path,
) -> None:
    peer = tmp_path / "python"
    peer.write_text(f"#!{sys.executable}\n{STRANGER}")
    peer.chmod(0o755)
    path = made(tmp_path, 30)
    cells = run("--trace", str(path), "--stream-gb", "0", KVLINT_PYTHON=str(peer))
    assert [line[1] for line in cells if line[0] == "hash lru"] == [
        "made",
        "made",
        *["trace30"] * 2,
    ]
    assert [line[-1] for line in cells if line[0] == "kvlint 0"] == ["other rules"] * 2
    assert not [line for line in cells if line[0].startswith("streamed")]


def test_a_made_trace_is_the_beginning_of_a_longer_one(tmp_path: Path) -> None:
    few, more = (made(tmp_path, count).read_text() for count in (50, 400))
    assert more.startswith(few)
    requests = [json.loads(line) for line in more.splitlines()]
    times = [request["timestamp"] for request in requests]
    assert times == sorted(times)
    for request in requests:
        assert len(request["hash_ids"]) == -(-request["input_length"] // 512)
    names = [name for request in requests for name in request["hash_ids"]]
    assert len(set(names)) < len(names) - len(requests)  # more is shared than the first block


@pytest.mark.parametrize("section", ["prefix", "simulators"])
def test_the_document_has_a_place_for_what_is_written(section: str) -> None:
    page = (SCRIPTS.parent / "docs/performance.md").read_text("utf-8")
    assert page.count(f"<!-- measured: {section} -->\n") == 1
