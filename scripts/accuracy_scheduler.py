"""How kvtool's scheduler compares with vLLM's own decisions, and its waste with the published one.

Used by scripts/accuracy.py. A row is a run of vLLM 0.32's V1 scheduler: `config`, `step_time`,
`requests`, and what it decided for each request and in each step (`truth`).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

Row = dict[str, Any]
PUBLISHED = {  # vLLM paper, Figure 2: token states, reservation, internal, external and others
    "max": (20.4, 13.3, 57.3, 8.9),
    "pow2": (26.8, 17.9, 13.6, 41.6),
    "oracle": (38.2, 25.2, 0.0, 36.6),
    "paged": (96.3, None, None, None),
}
FIGURE_15 = "fragment --workload vllm-paper --allocator paged --n 2,4,6 --num-requests 3000"
FIGURE_2 = "fragment --workload vllm-paper --allocator max,pow2,oracle,paged --num-requests 100000"


def settings_of(row: Row) -> Any:
    """The settings that a row was measured with."""
    from kvtool.sim.settings import Settings, StepTime

    config, law = row["config"], row["step_time"]
    return Settings(
        num_blocks=config["usable_blocks"],
        block_size=config["block_size"],
        max_model_len=config["max_model_len"],
        max_num_seqs=config["max_num_seqs"],
        max_num_active_seqs=config["max_num_active_seqs"],
        max_batched_tokens=config["max_num_batched_tokens"],
        max_scheduled_tokens=config["max_num_scheduled_tokens"],
        chunked_prefill=config["chunked_prefill"],
        watermark=config["watermark"],
        reserve_full_prompt=config["scheduler_reserve_full_isl"],
        long_prefill_threshold=config["long_prefill_token_threshold"],
        long_prefill_adaptive=config["long_prefill_token_threshold_adaptive"],
        on_stall=config["on_stall"].replace("_", "-"),
        finish_by=config["finish_by"].replace("_", "-"),
        prefix_caching=config["prefix_caching"],
        policy=config["policy"],
        async_scheduling=config["async_scheduling"],
        step_time=StepTime(
            base_ns=law["base_ns"],
            token_ns=law["per_scheduled_token_ns"],
            context_ns=law["per_context_token_ns"],
        ),
    )


def requests_of(row: Row) -> Any:
    """The requests of a row, by index."""
    import numpy as np

    from kvtool.requests import Requests

    asked, names = row["requests"], (one.name for one in fields(Requests))
    return Requests(**{name: np.array(asked[name], np.int64) for name in names if name in asked})


def contents_of(row: Row) -> Any:
    """What the requests of a row consist of; None: the row does not say, since nothing is cached."""
    import numpy as np

    from kvtool.contents import of_segments

    segments = row["requests"].get("segments")
    if segments is None:
        return None
    return of_segments(
        np.array([len(one) // 3 for one in segments]),
        np.array([number for one in segments for number in one], np.int64),
        np.array(row["requests"]["out_stream"], np.int64),
    )


def digest(values: Iterable[int]) -> str:
    """How the rows keep a long list: sha256 of its decimals, joined by commas."""
    return hashlib.sha256(",".join(map(str, values)).encode()).hexdigest()


def differences(row: Row, outcomes: dict[str, list[int]], steps: dict[str, list[int]]) -> list[str]:
    """What of a run is not as vLLM had it."""
    truth, wrong = row["truth"], []
    for name, values in truth["per_request"].items():
        if name in outcomes and outcomes[name] != values:
            wrong.append(name)
    for name in ("first_token_ns", "finish_ns"):
        if digest(outcomes[name]) != truth[f"{name}_sha256"]:
            wrong.append(name)
    for name, told in truth["per_step"].items():
        values = steps[name]
        got = {"n": len(values), "sum": sum(values), "max": max(values), "first50": values[:50]}
        got["sha256"] = digest(values)
        if any(got[kind] != value for kind, value in told.items()):
            wrong.append(f"{name} of the steps")
    if (len(steps["end_ns"]), steps["end_ns"][-1]) != (truth["steps"], truth["end_ns"]):
        wrong.append("the end")
    return wrong


TOTALS = {
    "preemptions": "preemptions",
    "queried_tokens": "queried_tokens",
    "hit_tokens": "hit_tokens",
    "requery_tokens": "requery_tokens_after_preemption",
    "rehit_tokens": "rehit_tokens_after_preemption",
}
"""Of a replay, and in a row."""


def engine_differences(row: Row) -> list[str]:
    """What of a row `kvtool simulate` decides otherwise."""
    from kvtool.sim.replay import replay

    found = replay(requests_of(row), settings_of(row), contents=contents_of(row))
    outcomes = {name: column.tolist() for name, column in found.outcomes.items()}
    outcomes["arrival_ns"] = found.arrival_ns.tolist()
    steps = {name: column.tolist() for name, column in found.steps.items()}
    totals = row["truth"]["totals"]
    wrong = [name for name, told in TOTALS.items() if getattr(found, name) != totals[told]]
    return differences(row, outcomes, steps) + wrong


def figure_2() -> list[str]:
    """The paper's table and ours: shares of the slots in percent, and the difference."""
    lines = [
        "## The waste that the vLLM paper measured (Figure 2)", "",
        f"`kvtool {FIGURE_2}` beside the",
        "published shares of the KV slots, in percent. Published are the model, the memory (15,728",
        "slots), the maximum length, the buddy allocator and the mean lengths; what we chose, once for",
        "all four, is in the preset's note (`kvtool presets --show vllm-paper`). Orca's own scheduler",
        "and the arrivals of the experiment are not known: here all requests wait from the start.",
        "The paper counts what the buddy allocator rounds up as external; here it is internal.", "",
        "| | token states | paper | off | reserved | paper | internal + external | paper | mean batch |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for row in _rows(FIGURE_2):
        token, reserved, internal, external = PUBLISHED[row["allocator"]]
        own = 100 * row["token_share"]
        rest = 100 * (row["internal_share"] + row["external_share"] + row["idle_share"])
        waste = "–" if internal is None else f"{internal + external:.1f}"
        lines.append(
            f"| {row['allocator']} | {own:.1f} | {token} | {own - token:+.1f} "
            f"| {100 * row['reserved_share']:.1f} | {'–' if reserved is None else reserved} "
            f"| {rest:.1f} | {waste} | {row['mean_batch']:.2f} |"
        )
    return lines


def savings() -> list[str]:
    """Blocks saved by sharing prompts, beside the paper's range."""
    saved = [f"{100 * row['saved_share']:.1f} % (n = {row['n']})" for row in _rows(FIGURE_15)]
    return [
        "## What sharing saves (Figure 15)", "",
        f"`kvtool {FIGURE_15}`:",
        f"parallel sampling saves {', '.join(saved)} of the blocks, where the paper prints",
        "16.2-30.5 % on ShareGPT for n = 2 to 6. Each sample has the output length of its request.",
    ]  # fmt: skip


def _rows(command: str) -> list[Row]:
    from kvtool.cli.main import run

    page = io.StringIO()
    with contextlib.redirect_stdout(page):
        code = run([*command.split(), "--json", "-q"])
    if code:
        raise SystemExit(f"kvtool {command}: exit code {code}")
    rows: list[Row] = json.loads(page.getvalue())["rows"]
    return rows
