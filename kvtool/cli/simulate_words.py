"""The words of `kvtool simulate`: where the requests come from, and what each row is about."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvtool.cli import fragment_words, scheduler_options
from kvtool.cli.options import names_in
from kvtool.errors import KvtoolError, usage_error
from kvtool.model_pool import Gpus, gpus_of
from kvtool.pool import WAYS as WAYS_IN_WORDS
from kvtool.pool import Pool
from kvtool.prefill import prefill_of
from kvtool.requests import Requests
from kvtool.sim.settings import Settings
from kvtool.slo import Slo, parse_slo
from kvtool.step_law import StepLaw, calibrated, law_of
from kvtool.trace import read_trace
from kvtool.traffic import AS_TRACED, SATURATED, all_requests, rate_of
from kvtool.units import parse_counts

if TYPE_CHECKING:
    from kvtool.contents import Contents
    from kvtool.trace import Trace

STATIC, CONTINUOUS, CHUNKED = "static", "continuous", "chunked"
SCHEDULERS = (STATIC, CONTINUOUS, CHUNKED)
USUAL_LENGTH = "8192"
OF_MODEL = ("weights", "gpu_memory_utilization", "kv_dtype", "dtype", "tp", "efficiency")
MADE = ("workload", *fragment_words.DISTS, *fragment_words.OF_LENGTHS)
WAYS = ("num_blocks", "pool_tokens", "model", "kv_memory", "gpu")
OF_SCHEDULER = (
    "block_size", "max_model_len", "max_num_seqs", "max_num_active_seqs", "max_batched_tokens",
    "max_scheduled_tokens", "chunked_prefill", "prefix_caching", "watermark", "reserve_full_prompt",
    "long_prefill_threshold", "long_prefill_adaptive", "policy", "async_scheduling", "finish_by",
    "on_stall",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a row is about. `requests` arrive as `rate` says; `priced_usd` is of all its GPUs an hour."""

    name: str
    is_file: bool
    rate: str
    requests: Requests
    contents: Contents | None
    scheduler: str
    settings: Settings
    model: str | None = None
    gpu: str | None = None
    num_gpus: int | None = None
    priced_usd: float | None = None
    made: Mapping[str, Any] = field(default_factory=dict)


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
    notes: list[str] = []
    traffics = None
    if given["requests"] is not None:
        found, longest = _of_file(given, notes), None
    else:
        traffics = fragment_words.traffics_of({**given, "trace": None})
        found, longest = _of_made(traffics, given["seed"]), traffics.longest
        notes += traffics.notes
    law, gpus = _law(given, notes)
    pools = _pools(given, traffics, notes)
    words = _of_scheduler(given, law, longest)
    grid = scheduler_options.scheduler_grid(words)
    scheduler_options.check_rows([found, pools, schedulers, grid])
    cases = [
        replace(
            one, scheduler=name, settings=_setting(pool, name, rules),
            model=given["model"], gpu=gpus and gpus.preset.id, num_gpus=gpus and gpus.tp,
            priced_usd=_price(given, gpus),
        )
        for one, pool, name, rules in itertools.product(found, pools, schedulers, grid)
    ]  # fmt: skip
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
    plain = given["prefix_caching"] or given["async_scheduling"] or given["policy"] != "fcfs"
    if STATIC in names and plain:
        raise usage_error(
            "--scheduler static knows no prefix caching, priorities or asynchronous steps",
            "leave them out, or static",
        )
    return names


# -- time and cost


def _law(given: Mapping[str, Any], notes: list[str]) -> tuple[StepLaw | None, Gpus | None]:
    """What a step takes if it was not typed: measured, or by the GPU."""
    gpus = None if given["gpu"] is None else gpus_of(given["gpu"], given["tp"])
    if given["calibrate"] is not None:
        law = calibrated(given["calibrate"])
        notes.append(f"a step takes {law.source}")
        return law, gpus
    if given["step_time"] is not None or gpus is None:
        return None, gpus
    names = ("gpu", "dtype", "kv_dtype", "weights", "tp", "efficiency")
    try:
        prefill = prefill_of(
            fragment_words.load, given["model"], **{name: given[name] for name in names}
        )
    except KvtoolError as error:
        if error.code not in ("prefill_not_counted", "weights_not_counted"):
            raise
        raise KvtoolError(
            error.message, "give the step's time with --step-time or --calibrate", code=error.code
        ) from error
    law = law_of(prefill)
    notes.append(f"a step takes {law.source}")
    return law, gpus


def _price(given: Mapping[str, Any], gpus: Gpus | None) -> float | None:
    """USD an hour of all GPUs of a replica."""
    each: float | None = given["price"]
    if each is not None and not 0 < each < 1e6:
        raise usage_error(f"--price: {each} is no price", "give the USD that a GPU costs an hour")
    if gpus is None:
        return each  # of the one machine that nobody named
    hourly: float | None = gpus.preset.price_usd_per_hour if each is None else each
    return None if hourly is None else hourly * gpus.tp


def _of_scheduler(
    given: Mapping[str, Any], law: StepLaw | None, longest: int | None
) -> dict[str, Any]:
    """The scheduler's options, with what follows from the workload and the GPU."""
    words = {name: given[name] for name in OF_SCHEDULER}
    words["max_model_len"] = given["max_model_len"] or str(longest or USUAL_LENGTH)
    del words["chunked_prefill"]
    words["step_time"] = given["step_time"]
    if law is not None:
        terms = asdict(law.step_time)
        words["step_time"] = ",".join(f"{name}={value}" for name, value in terms.items())
    return words


def _setting(pool: Pool, scheduler: str, rules: Mapping[str, Any]) -> Settings:
    settings = Settings(
        num_blocks=pool.num_blocks(rules.get("block_size", 16)),
        chunked_prefill=scheduler == CHUNKED,
        **rules,
    )
    if settings.num_slots > scheduler_options.MAX_SLOTS:
        raise usage_error(
            f"{settings.num_blocks:,} blocks of {settings.block_size:,} tokens are more than 2^40 tokens",
            "give fewer --num-blocks, or a smaller --block-size",
        )
    return settings


# -- requests and pools


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


def _of_made(traffics: Any, seed: int) -> list[Case]:
    """The same requests at every rate, those that --find-rate tries among them."""
    cases = []
    for count, rate in itertools.product(traffics.counts, traffics.rates):
        if rate == AS_TRACED:
            raise usage_error(
                "--rate trace is of a file with time stamps", "give --rate saturated or a number"
            )
        traffic = traffics.traffic(count, SATURATED, traffics.longest)
        requests = at_rate(all_requests(traffic), rate_of(rate), seed)
        cases.append(_case(traffic.name, False, rate, requests, None, traffic.made))
    return cases


def _of_file(given: Mapping[str, Any], notes: list[str]) -> list[Case]:
    trace = read_trace(
        given["requests"], format=given["trace_format"], with_contents=given["prefix_caching"]
    )
    _check_contents(given, trace)
    notes += _notes_of(trace, given["policy"])
    rates = [AS_TRACED] if given["rate"] is None else given["rate"].split(",")
    counts = [len(trace.requests)]
    if given["num_requests"] is not None:
        asked = parse_counts(given["num_requests"], name="--num-requests")
        counts = [min(count, len(trace.requests)) for count in asked]
        if trace.contents is not None and min(counts) < len(trace.requests):
            raise usage_error(
                "--num-requests cuts the file, and --prefix-caching knows it whole",
                "cut the file itself: head -n",
            )
    cases = []
    for count, rate in itertools.product(dict.fromkeys(counts), rates):
        requests = trace.requests.first(count)
        if rate.strip() != AS_TRACED:
            requests = at_rate(requests, rate_of(rate.strip()), given["seed"])
        cases.append(_case(trace.name, True, rate.strip(), requests, trace.contents, {}))
    return cases


def at_rate(requests: Requests, rate: float | None, seed: int) -> Requests:
    """The same requests with Poisson arrivals, so many a second; None: all at the start."""
    import numpy as np

    from kvtool.workload import check_span, poisson_arrivals

    if requests.parent is not None:
        raise usage_error(
            "its requests wait for each other (parent): they have no other arrivals",
            "leave out --rate and --find-rate",
        )
    if rate is None:
        return replace(requests, arrival_ns=np.zeros_like(requests.arrival_ns))
    check_span(len(requests), rate, "raise the rate")
    rng = np.random.default_rng(seed)
    return replace(requests, arrival_ns=poisson_arrivals(rng, len(requests), rate))


def _case(
    name: str, is_file: bool, rate: str, requests: Requests, contents: Contents | None,
    made: Mapping[str, Any],
) -> Case:  # fmt: skip
    return Case(
        name=name, is_file=is_file, rate=rate, requests=requests, contents=contents, made=made,
        scheduler=CHUNKED, settings=Settings(num_blocks=1),
    )  # fmt: skip


def _check_contents(given: Mapping[str, Any], trace: Trace) -> None:
    """Refuse to cache what is not known."""
    if given["prefix_caching"] and trace.contents is None:
        raise KvtoolError(
            f"--prefix-caching: {trace.name} does not say what its prompts consist of",
            "give each line segments and out_stream, take a trace with hash_ids (mooncake, bailian), "
            "or leave out --prefix-caching",
            code="trace",
        )


def _notes_of(trace: Trace, policy: str) -> list[str]:
    notes = [f"{trace.name}: {text}" for text in trace.notes]
    if not trace.has_arrivals:
        notes.append(f"{trace.name}: it has no arrivals, so all requests arrive at once")
    by_priority, there = policy == "priority", trace.requests.priority is not None
    if there and not by_priority:
        notes.append(f"{trace.name}: priorities are not looked at by --policy fcfs")
    if by_priority and not there:
        notes.append(f"{trace.name}: all requests have one priority")
    return notes
