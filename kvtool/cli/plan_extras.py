"""What a plan says besides, as typed: real lengths, ways to split GPUs, prefill apart, tiers below the GPU."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from kvtool.beyond import disaggregation, offload, parallel_rows, prefill_on
from kvtool.catalog import preset_ids
from kvtool.cli.simulate_disaggregated import link_bits
from kvtool.decode_speed import speed
from kvtool.errors import KvtoolError, usage_error
from kvtool.fitting import alone
from kvtool.plan import PlanCase
from kvtool.plan_lengths import (
    NUM_REQUESTS,
    Lengths,
    concurrency_of,
    length_fields,
    lengths_of,
    made_requests,
)
from kvtool.plan_model import PlanModel
from kvtool.plan_query import Gpus, PlanQuery, gpus_named
from kvtool.plan_shared import shared_concurrency_of, shared_fields
from kvtool.prompts import Prompts, made, traced
from kvtool.run import Row
from kvtool.sharing import sharing_of
from kvtool.trace import read_trace
from kvtool.units import parse_bytes, parse_count

MOST_REQUESTS = 10**7
KINDS = "--disaggregate prefill=h100:1,decode=h200:1"
TIERS = "--tiers cpu=64GiB@25GB/s,disk=1TiB@6GB/s"


class Requests:
    """The requests that lengths are of, read once; None where one context is all."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.name = given["workload"] or given["trace"]
        self.lengths: Lengths | None = None
        self.prompts: Prompts | None = None
        if given["workload"] is not None:
            self._make(given)
        elif given["trace"] is not None:
            found = read_trace(given["trace"])
            self.lengths = lengths_of(found.requests)
            self.prompts = _named_blocks(given["trace"])

    def _make(self, given: Mapping[str, Any]) -> None:
        name, count = (
            given["workload"],
            _count_of(given),
        )
        if name in preset_ids("prefixes") and name not in preset_ids("workloads"):
            workload = replace(sharing_of(name, seed=given["seed"]), num_requests=count)
            self.prompts = made(workload)
            self.lengths = lengths_of(*self.prompts)
        else:
            requests = made_requests(name, num_requests=count, seed=given["seed"])
            self.lengths = lengths_of(requests)


def _count_of(given: Mapping[str, Any]) -> int:
    if given["num_requests"] is None:
        return NUM_REQUESTS
    return parse_count(given["num_requests"], name="--num-requests", high=MOST_REQUESTS)


def _named_blocks(path: str) -> Prompts | None:
    """A trace that says what its prompts consist of; None for one of lengths alone."""
    try:
        return traced(path)
    except KvtoolError:
        return None


def contexts_of(query: PlanQuery, requests: Requests, model: PlanModel) -> PlanQuery:
    """With real lengths, a request is as long as 99 % of them are, unless a context is given; the engine serves
    the longest."""
    if requests.lengths is None:
        return query
    top = model.shape.max_context if model.shape.max_context_stated else None

    def served(tokens: int) -> int:
        return max(1, tokens if top is None else min(tokens, top))

    longest = max(served(requests.lengths.longest), *query.contexts, 1)
    if query.contexts:
        return replace(query, max_model_len=longest)
    return replace(
        query,
        contexts=(served(requests.lengths.p99),),
        context_basis=f"p99 of {requests.name}",
        max_model_len=longest,
    )


def extras(
    given: Mapping[str, Any], model: PlanModel, query: PlanQuery, case: PlanCase, requests: Requests,
    notes: list[str],
) -> Row:  # fmt: skip
    """Fields besides those of a plan."""
    row = lengths_too(case, requests, notes)
    if given["ways"]:
        ways = parallel_rows(model, alone(query, case), case.gpu, case.gpus)
        notes += ways.notes
        row["ways"] = list(ways.rows)
        row["refused_ways"] = [
            {"reason": one.reason, "ways": [str(way) for way in one.ways]} for one in ways.refused
        ]
    if given["disaggregate"] is not None:
        first, second = kinds_of(given["disaggregate"])
        prompt, output = _apart_lengths(given, requests)
        bits = float(link_bits(given["link"]))
        asked = replace(alone(query, case), tps=query.tps[:1], pps=query.pps[:1], dps=(None,))
        try:
            found = asdict(disaggregation(model, asked, first, second, bits, prompt, output))
            notes += found.pop("notes")
            row["disaggregation"] = found
        except KvtoolError as error:  # the plan stands without it
            notes.append(f"--disaggregate: {error.message}")
            row["disaggregation"] = None
    if given["tiers"] is not None:
        row["tiers"] = _tiers(given, model, query, case, notes)
    return row


def _apart_lengths(given: Mapping[str, Any], requests: Requests) -> tuple[int, int]:
    """Of a request: as given, else the means of real ones."""
    lengths = requests.lengths
    means = ("2048", "256")
    if lengths is not None:
        sides = (lengths.prompt_tokens, lengths.output_tokens)
        means = tuple(str(max(2, round(float(side.mean())))) for side in sides)  # type: ignore[assignment]
    prompt = parse_count(given["prompt_tokens"] or means[0], name="--prompt-tokens")
    return prompt, parse_count(given["output_tokens"] or means[1], name="--output-tokens")


def lengths_too(case: PlanCase, requests: Requests, notes: list[str]) -> Row:
    """What real lengths come to, where there are some."""
    return {} if requests.lengths is None else _of_lengths(case, requests, notes)


def _of_lengths(case: PlanCase, requests: Requests, notes: list[str]) -> Row:
    assert requests.lengths is not None, "checked by the caller"
    budget = case.memory.left.best
    found = concurrency_of(case.holder, budget, requests.lengths, case.replicas)
    notes += found.notes
    fields = length_fields(found)
    if case.max_num_seqs is not None:  # more may fit than the engine runs
        most = float(case.max_num_seqs * case.replicas)
        fields |= {
            name: min(fields[name], most) for name in fields if name.startswith("max_concurrency_")
        }
    fields |= _running(case, found.lengths.mean_running, fields["max_concurrency_running"])
    row: Row = {"workload": requests.name, "lengths": fields, "sharing": None}
    if requests.prompts is not None:
        try:
            shared = shared_concurrency_of(case.holder, budget, requests.prompts, case.replicas)
            row["sharing"] = shared_fields(shared)
        except KvtoolError as error:
            notes.append(f"nothing is said of shared prefixes: {error.message}")
    return row


def _running(case: PlanCase, tokens: float, requests: float) -> Row:
    """How fast the real mix decodes, all that run at their mean length; None where that is not known."""
    names = ("running_tpot_s", "running_output_tokens_per_s", "running_usd_per_million_tokens")
    batch = requests / case.replicas
    if case.loads is None or case.machine is None or not 1 <= batch < math.inf:
        return dict.fromkeys(names)
    found = speed(case.loads, case.machine, batch=batch, context=round(tokens))
    rate = found.output_tokens_per_s * case.replicas
    price = None if case.usd_per_hour is None else case.usd_per_hour * case.gpus
    million = None if price is None else price / 3600 / rate * 1e6
    return dict(zip(names, (found.tpot_s, rate, million), strict=True))


def kinds_of(text: str) -> tuple[Gpus, Gpus]:
    """`prefill=h100:4,decode=h200:4`."""
    found: dict[str, Gpus] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(prefill|decode)=([^=,]+)", part.strip())
        if match is None or match[1] in found:
            raise usage_error(
                f"--disaggregate: '{part[:40]}' is no kind of its own", f"write {KINDS}"
            )
        kind = gpus_named(match[2])
        if len(kind) != 1:
            raise usage_error("--disaggregate takes one preset for each kind", f"write {KINDS}")
        found[match[1]] = kind[0]
    if len(found) < 2:
        raise usage_error("--disaggregate names prefill and decode", f"write {KINDS}")
    return found["prefill"], found["decode"]


def tiers_of(text: str | None) -> dict[str, tuple[int, float]]:
    """Bytes and bytes a second of `cpu` and `disk`."""
    found: dict[str, tuple[int, float]] = {}
    for word in () if text is None else text.split(","):
        match = re.fullmatch(r"(cpu|disk)=([^@]+)@(.+)/s", word.strip())
        if match is None or match[1] in found:
            raise usage_error(f"--tiers: '{word.strip()[:40]}' is no tier", f"write {TIERS}")
        size = parse_bytes(match[2], name="--tiers")
        rate = link_bits(f"{match[3]}/s", name="--tiers") / 8
        if not size:
            raise usage_error(
                f"--tiers: '{word.strip()[:40]}' holds or moves nothing", f"write {TIERS}"
            )
        found[match[1]] = size, rate
    return found


def _tiers(
    given: Mapping[str, Any], model: PlanModel, query: PlanQuery, case: PlanCase, notes: list[str]
) -> list[dict[str, Any]]:
    tiers = tiers_of(given["tiers"])
    cpu, disk = (tiers.get(name, (0, 0.0)) for name in ("cpu", "disk"))
    layout = case.holder.layout
    prefill = None
    try:
        prefill = prefill_on(model, query, case.gpu, layout.tp, layout.kv.name)
    except KvtoolError as error:
        notes.append(f"whether loading beats computing is not known: {error.message}")
    rows = []
    for one in offload(
        case, prefill, cpu_bytes=cpu[0], disk_bytes=disk[0],
        cpu_bandwidth=cpu[1] or disk[1], disk_bandwidth=disk[1],
    ):  # fmt: skip
        found = asdict(one)
        notes += found.pop("notes")
        rows.append(found)
    return rows
