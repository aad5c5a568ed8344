"""Prefill and decode apart, as `kvtool simulate --disaggregate` takes it: two kinds of instances, a link."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvtool.cli import fragment_words, scheduler_options
from kvtool.cli.simulate_law import stated_law
from kvtool.errors import KvtoolError, usage_error
from kvtool.model_pool import gpus_of, token_bytes_of
from kvtool.pool import Pool, pool_of
from kvtool.sim.disaggregated import Split
from kvtool.sim.settings import Settings, StepTime
from kvtool.simulate_disaggregated import DISAGGREGATED
from kvtool.units import parse_bytes, parse_count

if TYPE_CHECKING:
    from kvtool.cli.simulate_requests import Case

EXAMPLE = "--disaggregate prefill=h100:4,decode=h200:4"
KINDS = ("prefill", "decode")
MOST_INSTANCES = 256
BITS = {"m": 10**6, "g": 10**9, "t": 10**12}
INSTEAD = ("gpu", "num_blocks", "pool_tokens", "kv_memory", "scheduler", "calibrate")
"""What --disaggregate says itself, or is not modelled with."""
OF_GPU = ("weights", "kv_dtype", "dtype")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Instances of `tp` GPUs each."""

    gpu: str
    num_gpus: int
    tp: int
    pool: Pool
    law: StepTime
    basis: str
    """What the law rests on."""
    usd_per_hour: float | None

    @property
    def instances(self) -> int:
        """Replicas of the model."""
        return self.num_gpus // self.tp


def check_disaggregated(given: Mapping[str, Any], *, drawn: bool) -> None:
    """Refuse what contradicts --disaggregate, or is not modelled with it."""
    if given["disaggregate"] is None:
        if given["link"] is not None:
            raise usage_error("--link is of --disaggregate", f"add {EXAMPLE}, or leave it out")
        return
    if given["model"] is None:
        raise usage_error("--disaggregate depends on the model", "add --model llama-3-8b")
    if given["link"] is None:
        raise usage_error("--disaggregate sends caches over a link", "add --link 400Gb")
    for name in INSTEAD:
        if given[name] is not None:
            flag = scheduler_options.flag_of(name)
            raise usage_error(f"{flag} and --disaggregate exclude each other", "leave out one")
    apart = {
        "--prefix-caching": given["prefix_caching"],
        "--async-scheduling": given["async_scheduling"],
        f"--policy {given['policy']}": given["policy"] != "fcfs",
        "--on-stall stop": given["on_stall"] != "abort-head",
        "--preemption swap": given["preemption"] != "recompute" or given["cpu_blocks"] is not None,
        "--swap-bandwidth": given["swap_bandwidth"] is not None,
        "--per-step: steps of several clocks": given["per_step"] is not None,
        "a picture: steps of several clocks": drawn,
    }
    for what, asked in apart.items():
        if asked:
            raise KvtoolError(
                f"--disaggregate is not modelled with {what}", "leave out one", code="unsupported"
            )


def cases_of(
    given: Mapping[str, Any], found: Sequence[Case], words: Mapping[str, Any], notes: list[str]
) -> list[Case]:
    """A case for each of the requests, each setting of the scheduler and each link."""
    links = [link_bits(word.strip()) for word in given["link"].split(",")]
    kinds = _kinds(given, notes)
    per_token, _ = token_bytes_of(
        fragment_words.load, given["model"], dtype=given["dtype"], kv_dtype=given["kv_dtype"], tp=1
    )
    if any((one.requests.arrival_ns < 0).any() for one in found):
        raise KvtoolError(
            "--disaggregate is not modelled with requests that follow others (parent)",
            "give each line its arrival_ns", code="unsupported",
        )  # fmt: skip
    grid = scheduler_options.scheduler_grid(words)
    scheduler_options.check_rows([found, grid, links])
    costs = [kind.usd_per_hour for kind in kinds.values()]
    cases = []
    for one, rules, link in itertools.product(found, grid, links):
        settings = {name: _setting(kind, rules, given) for name, kind in kinds.items()}
        split = Split(
            prefill=settings["prefill"], num_prefill=kinds["prefill"].instances,
            decode=settings["decode"], num_decode=kinds["decode"].instances,
            bits_per_s=link, bytes_per_token=per_token,
        )  # fmt: skip
        cases.append(
            replace(
                one, scheduler=DISAGGREGATED, settings=split.decode, split=split,
                model=given["model"], gpu="+".join(f"{k.gpu}:{k.num_gpus}" for k in kinds.values()),
                num_gpus=sum(kind.num_gpus for kind in kinds.values()),
                priced_usd=None if None in costs else sum(cost or 0.0 for cost in costs),
                step_time_basis="; ".join(dict.fromkeys(kind.basis for kind in kinds.values())),
            )
        )  # fmt: skip
    return cases


def _kinds(given: Mapping[str, Any], notes: list[str]) -> dict[str, Kind]:
    """`prefill=h100:4,decode=h200:4`; `/tp2` after a kind sets its own tensor-parallel ranks."""
    found: dict[str, Kind] = {}
    for part in given["disaggregate"].split(","):
        match = re.fullmatch(
            r"(prefill|decode)=([^:/=]+)(?::([0-9]+))?(?:/tp([0-9]+))?", part.strip()
        )
        if match is None or match[1] in found:
            raise usage_error(
                f"--disaggregate: '{part[:40]}' is no kind of its own", f"write {EXAMPLE}"
            )
        found[match[1]] = _kind(given, notes, *match.groups())
    missing = [name for name in KINDS if name not in found]
    if missing:
        raise usage_error(f"--disaggregate: there is no {missing[0]}", f"write {EXAMPLE}")
    return {name: found[name] for name in KINDS}


def _kind(
    given: Mapping[str, Any], notes: list[str], name: str, gpu: str, count: str, own: str | None
) -> Kind:
    number = parse_count(count or "1", name="--disaggregate", high=2**16)
    tp = parse_count(own or str(given["tp"] or 1), name="--tp", high=2**16)
    if number % tp or number // tp > MOST_INSTANCES:
        raise usage_error(
            f"--disaggregate: {number:,} GPUs are no whole instances of {tp:,}, at most {MOST_INSTANCES}",
            "give a multiple of --tp, or a kind its own: prefill=h100:4/tp2",
        )
    preset = gpus_of(gpu, tp).preset
    of_model = {name: given[name] for name in OF_GPU} | {"gpu": f"{gpu}:{tp}", "tp": tp}
    try:
        pool = pool_of(
            load=fragment_words.load, model=given["model"],
            gpu_memory_utilization=given["gpu_memory_utilization"], **of_model,
        )  # fmt: skip
    except KvtoolError as error:
        if error.code != "does_not_fit":
            raise
        raise KvtoolError(
            f"{name}: {error.message}",
            f"an instance is {tp:,} of the {number:,} GPUs: give it more, --tp 4 or {name}={gpu}:4/tp4",
            code=error.code,
        ) from error
    law = stated_law(given, of_model, notes, ranks=tp)
    assert law is not None, "there is a GPU"
    if law.source:
        notes.append(f"{name}: a step takes {law.source}")
    notes.append(f"{name}: {number // tp} × {preset.id}, the pool of each: {pool.source}")
    each = preset.price_usd_per_hour if given["price"] is None else given["price"]
    if each is not None and not 0 < each < 1e6:
        raise usage_error(f"--price: {each} is no price", "give the USD that a GPU costs an hour")
    return Kind(
        gpu=preset.id, num_gpus=number, tp=tp, pool=pool, law=law.step_time, basis=law.basis,
        usd_per_hour=None if each is None else each * number,
    )  # fmt: skip


def _setting(kind: Kind, rules: Mapping[str, Any], given: Mapping[str, Any]) -> Settings:
    blocks = kind.pool.usable_blocks(rules.get("block_size", 16))
    return Settings(
        num_blocks=blocks,
        chunked_prefill=given["chunked_prefill"],
        **{**rules, "step_time": kind.law},
    )


def link_bits(text: str, *, name: str = "--link") -> int:
    """Bits a second: `400Gb`, `400Gb/s` and `400gbps` are 400 × 10^9, `50GB/s` as many: b is a bit, B a byte."""
    match = re.fullmatch(r"([0-9]{1,9})(?:\.([0-9]{1,9}))?([MGTmgt])b(?:it)?(?:/s|ps)?", text)
    if match is not None:
        digits = match[2] or ""
        unit = BITS[match[3].lower()]
        bits: int = int(match[1] + digits) * unit // int("1" + "0" * len(digits))
    elif text.endswith(("B/s", "Bps")):
        bits = 8 * parse_bytes(text.removesuffix("/s").removesuffix("ps"), name=name)
    else:
        raise usage_error(
            f"{name}: '{text[:40]}' is no rate", "write bits a second, 400Gb, or bytes, 50GB/s"
        )
    if bits < 8000:
        raise usage_error(f"{name}: slower than 1 kB/s", "write bits a second, 400Gb")
    return bits
