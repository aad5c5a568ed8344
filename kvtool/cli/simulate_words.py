"""The words of `kvtool simulate`: where the requests come from, and what each row is about."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvtool.calibrate import calibrated, differs
from kvtool.cli import fragment_words, scheduler_options
from kvtool.cli.options import names_in
from kvtool.cli.simulate_disaggregated import cases_of
from kvtool.cli.simulate_law import stated_law
from kvtool.cli.simulate_requests import (
    CHUNKED,
    CONTINUOUS,
    MADE,
    STATIC,
    Case,
    of_file,
    of_made,
    of_shared,
    shared_workload,
)
from kvtool.cli.simulate_swaps import check_followers, swaps_of, with_swaps
from kvtool.errors import usage_error
from kvtool.model_pool import Gpus, gpus_of, ranks_of
from kvtool.pool import WAYS as WAYS_IN_WORDS
from kvtool.pool import Pool
from kvtool.sim.settings import Settings
from kvtool.slo import Slo, parse_slo
from kvtool.step_law import StepLaw

SCHEDULERS = (STATIC, CONTINUOUS, CHUNKED)
USUAL_LENGTH = "8192"
OF_MODEL = ("weights", "gpu_memory_utilization", "kv_dtype", "dtype", "tp", "efficiency")
WAYS = ("num_blocks", "pool_tokens", "model", "kv_memory", "gpu")
OF_SCHEDULER = (
    "block_size", "max_model_len", "max_num_seqs", "max_num_active_seqs", "max_batched_tokens",
    "max_scheduled_tokens", "chunked_prefill", "prefix_caching", "watermark", "reserve_full_prompt",
    "long_prefill_threshold", "long_prefill_adaptive", "index", "policy", "async_scheduling", "finish_by",
    "on_stall",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """What was typed, understood."""

    cases: Sequence[Case]
    slo: Slo | None
    find_rate: bool
    seed: int
    notes: tuple[str, ...]


def parse(given: Mapping[str, Any]) -> Words:
    """The options as typed; a file is read last."""
    _check(given)
    scheduler_options.check_modelled(given)
    slo = None if given["slo"] is None else parse_slo(given["slo"], given["slo_share"])
    schedulers = _schedulers(given)
    notes = _unheard(given, schedulers)
    traffics = None
    if given["requests"] is not None:
        found, longest = of_file(given, notes), None
    elif (shared := shared_workload(given)) is not None:
        found, longest = of_shared(shared, given, notes)
    else:
        traffics = fragment_words.traffics_of({**given, "trace": None})
        found, longest = of_made(traffics, given["seed"]), traffics.longest
        notes += traffics.notes
    if given["disaggregate"] is not None:
        apart = cases_of(given, found, _of_scheduler(given, None, longest), notes)
        return _words(given, apart, slo, notes)
    law, gpus, of_another = _law(given, notes)
    price = _price(given, gpus)
    pools = _pools(given, traffics, notes)
    words = _of_scheduler(given, law, longest)
    swaps = swaps_of(given, schedulers, gpus.tp if gpus else None)
    check_followers(any((one.requests.arrival_ns < 0).any() for one in found), swaps)
    grid = with_swaps(scheduler_options.scheduler_grid(words), swaps, notes)
    scheduler_options.check_rows([found, pools, schedulers, grid])
    cases = [
        replace(
            one, scheduler=name, settings=_setting(pool, name, rules),
            model=given["model"], gpu=gpus and gpus.preset.id, num_gpus=gpus and gpus.tp,
            priced_usd=None if of_another else price, bytes_per_token=swaps.bytes_per_token,
            **({} if law is None else {"step_time_basis": law.basis}),
        )
        for one, pool, name, rules in itertools.product(found, pools, schedulers, grid)
    ]  # fmt: skip
    return _words(given, cases, slo, notes)


def _words(
    given: Mapping[str, Any], cases: Sequence[Case], slo: Slo | None, notes: list[str]
) -> Words:
    return Words(
        cases=cases, slo=slo, find_rate=given["find_rate"], seed=given["seed"], notes=tuple(notes)
    )


def _check(given: Mapping[str, Any]) -> None:
    """Refuse words that contradict each other."""
    made = [name for name in MADE if given[name] is not None]
    if given["requests"] is not None and made:
        raise usage_error(
            f"--requests are given: {scheduler_options.flag_of(made[0])} says otherwise",
            "leave out one of the two",
        )
    if given["find_rate"] and given["slo"] is None:
        raise usage_error("--find-rate is of an objective", "add --slo ttft=1s,tpot=50ms")
    if given["find_rate"] and given["rate"] is not None:
        raise usage_error("--find-rate looks for the rate that --rate gives", "leave out one")
    if given["slo_share"] is not None and not given["find_rate"]:
        raise usage_error("--slo-share is of --find-rate", "add --find-rate, or leave it out")
    if given["calibrate"] is not None and given["step_time"] is not None:
        raise usage_error("--calibrate and --step-time both say what a step takes", "leave out one")
    typed = given["step_time"] is not None or given["calibrate"] is not None
    roofline = given["gpu"] is not None or given["disaggregate"] is not None
    if given["efficiency"] is not None and (typed or not roofline):
        raise usage_error(
            "--efficiency is of a GPU's roofline, and none says what a step takes here",
            "leave it out, or name a --gpu without --step-time and --calibrate",
        )
    if given["trace_format"] is not None and given["requests"] is None:
        raise usage_error("--trace-format is of a file", "add --trace FILE, or leave it out")
    if given["num_blocks"] is not None and given["kv_memory"] is not None:
        raise usage_error(
            "--num-blocks and --kv-memory both say how large the pool is", "leave out one"
        )
    named = [name for name in OF_MODEL if given[name] is not None]
    if given["model"] is None and (named or given["gpu"] or given["kv_memory"]):
        first = (named or ["gpu" if given["gpu"] else "kv_memory"])[0]
        raise usage_error(
            f"{scheduler_options.flag_of(first)} depends on the model",
            "add --model, such as --model llama-3-8b",
        )


def _schedulers(given: Mapping[str, Any]) -> list[str]:
    typed = given["scheduler"]
    if typed is None:
        return [CHUNKED if given["chunked_prefill"] else CONTINUOUS]
    names = names_in(typed, "--scheduler", SCHEDULERS)
    if CHUNKED in names and not given["chunked_prefill"]:
        raise usage_error(
            "--scheduler chunked and --no-chunked-prefill exclude each other", "leave out one"
        )
    plain = given["prefix_caching"] or given["async_scheduling"] or given["policy"] != "fcfs"
    if STATIC in names and plain:
        raise usage_error(
            "--scheduler static knows no prefix caching, priorities or asynchronous steps",
            "leave them out, or static",
        )
    return names


def _unheard(given: Mapping[str, Any], schedulers: Sequence[str]) -> list[str]:
    """Notes on options that static batches do not look at."""
    usual = {
        "max_batched_tokens": "8192", "max_scheduled_tokens": None, "watermark": "0",
        "long_prefill_threshold": "0", "on_stall": "abort-head", "reserve_full_prompt": True,
    }  # fmt: skip
    named = [scheduler_options.flag_of(name) for name, of in usual.items() if given[name] != of]
    if STATIC not in schedulers or not named:
        return []
    return [f"static batches do not look at {', '.join(named)}"]


def notes_of_settings(cases: Sequence[Case]) -> list[str]:
    """What the pools are where that is not plain, and what vLLM would say to them and to the limits."""
    grid = [case.settings for case in cases]
    sizes = sorted({one.num_slots for one in grid})
    notes = [f"the pools hold {sizes[0]:,} to {sizes[-1]:,} tokens"] if len(sizes) > 1 else []
    stepping = [case.settings for case in cases if case.scheduler != STATIC]
    refused = {
        "a pool of {0.num_slots:,} tokens does not hold one request of max_model_len {0.max_model_len:,}": [
            one for one in grid if one.num_slots < one.max_model_len
        ],
        "--max-batched-tokens {0.max_batched_tokens:,} is less than --max-num-seqs {0.max_num_seqs:,}": [
            one for one in stepping if one.max_batched_tokens < one.max_num_seqs
        ],
        "without chunked prefill, steps of {0.token_budget:,} tokens take no prompt of {0.max_model_len:,}": [
            one
            for one in stepping
            if not one.chunked_prefill and one.token_budget < one.max_model_len
        ],
    }
    notes += [
        f"{text.format(some[0])}: vLLM itself would not start with it"
        for text, some in refused.items()
        if some
    ]
    small = [one for one in stepping if one.token_budget < one.block_size]
    if small:
        notes.append(
            f"a step of {small[0].token_budget:,} tokens is less than a block of {small[0].block_size:,}"
        )
    return notes


# -- time and cost


def _law(given: Mapping[str, Any], notes: list[str]) -> tuple[StepLaw | None, Gpus | None, bool]:
    """What a step takes, if anything says it; whether it was measured of something else than what is asked
    for."""
    gpus = None if given["gpu"] is None else gpus_of(given["gpu"], given["tp"])
    if given["calibrate"] is not None:
        fit = calibrated(given["calibrate"])
        other = differs(
            fit, fragment_words.load, model=given["model"], gpus=gpus, dtype=given["dtype"]
        )
        notes += [f"a step takes {fit.law.source}", *([] if other is None else [other])]
        return fit.law, gpus, other is not None
    names = ("gpu", "dtype", "kv_dtype", "weights", "tp")
    of_model = None if gpus is None else {name: given[name] for name in names}
    return stated_law(given, of_model, notes, ranks=gpus.tp if gpus else 1), gpus, False


def _price(given: Mapping[str, Any], gpus: Gpus | None) -> float | None:
    """USD an hour of all GPUs of a replica."""
    each: float | None = given["price"]
    if each is not None and not 0 < each < 1e6:
        raise usage_error(f"--price: {each} is no price", "give the USD that a GPU costs an hour")
    if gpus is None:  # of the ranks of a machine that nobody named
        return None if each is None else each * ranks_of(given["tp"], 1)
    hourly: float | None = gpus.preset.price_usd_per_hour if each is None else each
    return None if hourly is None else hourly * gpus.tp


def _of_scheduler(
    given: Mapping[str, Any], law: StepLaw | None, longest: int | None
) -> dict[str, Any]:
    """The scheduler's options, with what follows from the workload and the GPU."""
    words = {name: given[name] for name in OF_SCHEDULER}
    words["max_model_len"] = given["max_model_len"] or str(longest or USUAL_LENGTH)
    del words["chunked_prefill"]
    words["step_time"] = None if law is None else law.step_time
    return words


def _setting(pool: Pool, scheduler: str, rules: Mapping[str, Any]) -> Settings:
    settings = Settings(
        num_blocks=(pool.num_blocks if scheduler == STATIC else pool.usable_blocks)(
            rules.get("block_size", 16)
        ),
        chunked_prefill=scheduler == CHUNKED,
        **rules,
    )
    if settings.num_slots > scheduler_options.MAX_SLOTS:
        raise usage_error(
            f"{settings.num_blocks:,} blocks of {settings.block_size:,} tokens are more than 2^40 tokens",
            "give fewer --num-blocks, or a smaller --block-size",
        )
    return settings


# -- pools


def _pools(given: Mapping[str, Any], traffics: Any, notes: list[str]) -> list[Pool]:
    """A pool for each amount that was typed. A GPU also says what a step takes, so that the pool may
    be given in blocks beside it."""
    words = dict(given)
    if given["num_blocks"] is not None or given["pool_tokens"] is not None:
        words |= dict.fromkeys(("model", "gpu", "kv_memory", *OF_MODEL))
    elif given["kv_memory"] is not None:
        words["gpu"] = None
    if traffics is None and not any(words[name] for name in WAYS):
        raise usage_error("nothing says how large the pool is", WAYS_IN_WORDS)
    pools, said = fragment_words.pools_of(words, traffics)
    notes += said
    return pools
