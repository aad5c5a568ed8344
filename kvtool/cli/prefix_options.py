"""The options of `kvtool prefix`: its prompts, its caches, what memory they have, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from kvtool.cli.size_options import complete_gpu, complete_kv_dtype, complete_model

PROMPTS, CACHE, MEMORY, WHY = "Prompts", "Cache", "Memory and worth", "Why"


def complete_workload(incomplete: str) -> list[str]:
    """Presets of workloads with shared prefixes that start like this."""
    from kvtool.catalog import preset_ids

    return [name for name in preset_ids("prefixes") if name.startswith(incomplete)]


TraceOpt = Annotated[
    str | None,
    typer.Option(
        "--trace", metavar="FILE", rich_help_panel=PROMPTS, show_default=False,
        help="Requests that name the blocks of their prompts, from a file, gzip too, or - for "
        "standard input.",
    ),
]  # fmt: skip
TraceFormatOpt = Annotated[
    str | None,
    typer.Option(
        "--trace-format", metavar="NAME", rich_help_panel=PROMPTS, show_default=False,
        help="mooncake, bailian or kvtool; found out if left out.",
    ),
]  # fmt: skip
TraceBlockSizeOpt = Annotated[
    str | None,
    typer.Option(
        "--trace-block-size", metavar="TOKENS", rich_help_panel=PROMPTS, show_default=False,
        help="Tokens of a block of the trace, where its format does not say it or says it wrongly.",
    ),
]  # fmt: skip
TenantsOpt = Annotated[
    str | None,
    typer.Option(
        "--tenants", metavar="COLUMN", rich_help_panel=PROMPTS, show_default=False,
        help="The column of the trace that says whose a request is.",
    ),
]  # fmt: skip
WorkloadOpt = Annotated[
    str | None,
    typer.Option(
        "--workload", metavar="NAMES", rich_help_panel=PROMPTS, show_default=False,
        autocompletion=complete_workload,
        help="Made prompts: system-prompts, few-shot, multi-turn-chat (default without --trace), agent, "
        "batched, tree-of-thought, unique, or all; a mix of tenants as chat:3+agent:1.",
    ),
]  # fmt: skip
NumRequestsOpt = Annotated[
    str | None,
    typer.Option(
        "--num-requests", metavar="N", rich_help_panel=PROMPTS, show_default=False,
        help="Requests to make (default 2,000), or the first so many of a trace.",
    ),
]  # fmt: skip


def _of_workload(flag: str, metavar: str, text: str) -> object:
    return typer.Option(
        flag, metavar=metavar, rich_help_panel=PROMPTS, show_default=False, help=text
    )


NumPrefixesOpt = Annotated[
    str | None,
    _of_workload(
        "--num-prefixes", "N", "Different prefixes that sessions of --workload begin with."
    ),
]
PrefixTokensOpt = Annotated[
    str | None, _of_workload("--prefix-tokens", "TOKENS", "Their mean length.")
]
ZipfOpt = Annotated[
    str | None,
    _of_workload(
        "--zipf", "S", "How uneven they are: the k-th most frequent has a weight of k^-S."
    ),
]
ShareOpt = Annotated[
    str | None,
    _of_workload(
        "--share", "SHARE", "Sessions that begin with one of them; the others share with nobody."
    ),
]
SessionTokensOpt = Annotated[
    str | None,
    _of_workload("--session-tokens", "TOKENS", "Mean length of what a session's requests share."),
]
TurnTokensOpt = Annotated[
    str | None, _of_workload("--turn-tokens", "TOKENS", "Mean length of what each turn adds.")
]
OutputTokensOpt = Annotated[
    str | None, _of_workload("--output-tokens", "TOKENS", "Mean length of what is generated.")
]
TurnsOpt = Annotated[
    str | None, _of_workload("--turns", "N", "Turns of a session: levels of its tree.")
]
BranchOpt = Annotated[
    str | None, _of_workload("--branch", "N", "Requests that go on from each: children of a node.")
]
ConcurrencyOpt = Annotated[
    str | None, _of_workload("--concurrency", "N", "Sessions whose requests come in turns.")
]
IndexOpt = Annotated[
    str | None,
    typer.Option(
        "--index", metavar="NAMES", rich_help_panel=CACHE, show_default=False,
        help="hash (vLLM: full blocks by hash), radix (SGLang: a tree of token runs). Default: both.",
    ),
]  # fmt: skip
CapacityOpt = Annotated[
    str,
    typer.Option(
        "--capacity", metavar="SIZES", rich_help_panel=CACHE,
        help="Usable blocks of --block-size tokens (1000,10000), memory with --model (20GiB), gpu: what "
        "--gpu has left beside the weights, or all: the hit rate at every capacity.",
    ),
]  # fmt: skip
BlockSizeOpt = Annotated[
    str | None,
    typer.Option(
        "--block-size", metavar="TOKENS", rich_help_panel=CACHE, show_default=False,
        help="Default: a trace's own; of made prompts 16 for hash and 1 for radix, and blocks of "
        "--capacity are of 16.",
    ),
]  # fmt: skip
PolicyOpt = Annotated[
    str,
    typer.Option(
        "--policy", metavar="NAMES", rich_help_panel=CACHE,
        help="Who is evicted first: lru, lfu, fifo, length-aware (of equally often hit the deepest).",
    ),
]  # fmt: skip
CacheOutputsOpt = Annotated[
    str | None,
    typer.Option(
        "--cache-outputs", metavar="NAMES", rich_help_panel=CACHE, show_default=False,
        help="none (default of a trace), unique: outputs take blocks that nobody finds, known: the next "
        "turn finds them (default of made prompts, which alone know them).",
    ),
]  # fmt: skip
PointsOpt = Annotated[
    str,
    typer.Option(
        "--points", metavar="N", rich_help_panel=CACHE,
        help="Capacities of the curve with --capacity all.",
    ),
]  # fmt: skip
ModelOpt = Annotated[
    str | None,
    typer.Option(
        "--model", metavar="MODEL", rich_help_panel=MEMORY, show_default=False,
        autocompletion=complete_model,
        help="Whose tokens they are: capacities in GiB, and the FLOPs that hits save.",
    ),
]  # fmt: skip
GpuOpt = Annotated[
    str | None,
    typer.Option(
        "--gpu", metavar="GPU", rich_help_panel=MEMORY, show_default=False,
        autocompletion=complete_gpu,
        help="Where prefill runs, with --model: the time to the first token that hits save.",
    ),
]  # fmt: skip
UtilizationOpt = Annotated[
    float | None,
    typer.Option(
        "--gpu-memory-utilization", metavar="SHARE", rich_help_panel=MEMORY, show_default=False,
        help="Of the GPU's memory, for weights and cache, with --capacity gpu. Default: 0.9.",
    ),
]  # fmt: skip
EfficiencyOpt = Annotated[
    float | None,
    typer.Option(
        "--efficiency", metavar="SHARE", rich_help_panel=MEMORY, show_default=False,
        help="Of the GPU's peak that prefill reaches. Default: 0.5, an estimate.",
    ),
]  # fmt: skip
WeightsOpt = Annotated[
    str | None,
    typer.Option(
        "--weights", metavar="MEMORY", rich_help_panel=MEMORY, show_default=False,
        help="The model's weights. Default: counted from its config.",
    ),
]  # fmt: skip
KvDtypeOpt = Annotated[
    str | None,
    typer.Option(
        "--kv-dtype", "--kv-cache-dtype", metavar="DTYPE", rich_help_panel=MEMORY,
        show_default=False, autocompletion=complete_kv_dtype,
        help="Of the cache, with --model: auto (default), fp8, int8, …",
    ),
]  # fmt: skip
DtypeOpt = Annotated[
    str | None,
    typer.Option(
        "--dtype", metavar="DTYPE", rich_help_panel=MEMORY, show_default=False,
        help="Of the model, with --model. Default: its config's.",
    ),
]  # fmt: skip
TpOpt = Annotated[
    str | None,
    typer.Option(
        "--tp", metavar="N", rich_help_panel=MEMORY, show_default=False,
        help="Tensor-parallel ranks, with --model: memory is that of one.",
    ),
]  # fmt: skip
TiersOpt = Annotated[
    str | None,
    typer.Option(
        "--tiers", metavar="TIERS", rich_help_panel=MEMORY, show_default=False,
        help="Below the GPU's --capacity, with --model: cpu=64GiB@25GB/s,disk=1TiB@6GB/s.",
    ),
]  # fmt: skip
ExplainOpt = Annotated[
    str | None,
    typer.Option(
        "--explain-request", metavar="N", rich_help_panel=WHY, show_default=False,
        help="What request N, counted from 1, found and why no more; the replay ends with it.",
    ),
]  # fmt: skip
ShowTreeOpt = Annotated[
    bool,
    typer.Option(
        "--show-tree", rich_help_panel=WHY, help="Draw the radix tree as it is at the end."
    ),
]
