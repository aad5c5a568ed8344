"""On how many rows of measured caches kvtool is exact, and every row where it is not.

    python scripts/accuracy.py                    the rows in tests/data
    python scripts/accuracy.py TRUTH CONFIGS [TRACES]   folders: measured rows, the models' configs,
                                                  the request traces that rows of prefix caches are of
    python scripts/accuracy.py --write            docs/accuracy.md anew, from tests/data

Rows are hf_cache (what transformers 5.24 holds in its cache objects), vllm_kv (a model, its
parallelism and lengths, and the pool that vLLM 0.32 lays out), vllm_groups (the same for mixes of
layer specs), scheduler (runs of vLLM 0.32's scheduler) and, with traces,
prefix (replays of vLLM 0.32's and SGLang 0.5.23's prefix caches). The block size that was asked for is
not in vLLM's rows: it was 16, or 64 in a second set, so a row is compared with what 16 makes, and with
what 64 makes if 16 makes another block size than the row's.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kvtool.cache import CacheLayout
from kvtool.catalog import class_defaults
from kvtool.dtypes import DTYPES as DTYPES_OF
from kvtool.dtypes import KvDtype
from kvtool.engines import transformers
from kvtool.engines.vllm import VllmPool, VllmSettings, parse_specs, pool_of, reserve
from kvtool.engines.vllm_specs import CLASSES
from kvtool.errors import KvtoolError
from kvtool.model import ModelShape, read_model

# the scripts beside this one
SCHEDULER, PREFIX, PLAN = "accuracy_scheduler", "accuracy_prefix", "accuracy_plan"
Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "tests/data"
PAGE = ROOT / "docs/accuracy.md"
WHAT = {
    "hf_cache": ("bytes of transformers 5.24.0's cache objects, by kind of tensor", "model types"),
    "vllm_kv": ("pools of vLLM 0.32.0: groups, blocks, bytes, tokens, concurrency", "models"),
    "vllm_groups": ("pools of vLLM 0.32.0 for hand-made mixes of layers", "mixes"),
    "scheduler": (
        "decisions of vLLM 0.32.0's scheduler, request by request and step by step",
        "families",
    ),
}
PREFIX_ROWS = """## Prefix caches

`python scripts/accuracy.py TRUTH CONFIGS TRACES` replays the Mooncake conversation trace (12,031 requests,
Apache-2.0, github.com/kvcache-ai/Mooncake, FAST25-release/traces), as vLLM 0.32.0's KVCacheManager and
SGLang 0.5.23's RadixCache did, request after request. Traces are too large to ship, so no test repeats it;
when this was last written, 6 of 6 rows of vLLM and 9 of 9 of SGLang were exact: hit tokens, evictions,
evicted leaves, rejections and what is cached at the end, at 1,000 to 100,000 blocks of 512 tokens, with
outputs cached and not, SGLang with pages of 1, 16 and 512 tokens and with LRU, LFU and FIFO.
"""
LIMITS = """## What this does not show

- transformers was run on a CPU with tiny random models: the sizes' rules, not any checkpoint. State
  dtypes of the CUDA kernels' path were not measured.
- vLLM's pools were laid out on a CPU, layers outermost. On GPUs a kernel may ask for larger blocks
  (FlashMLA: 64), and layouts with blocks outermost pack mixed pages otherwise. A GPU run with float32
  weights casts to 16 bit, which halves these figures.
- For a model type without a measured pool, `--engine vllm` applies vLLM's general rules and says so.
  Pipeline stages, context parallelism, draft models and MTP have no rows: they follow vLLM's source.
- vLLM layouts that are not modelled are refused by name: encoder-decoders but Whisper, Llama 3.2
  Vision, RWKV, RecurrentGemma, DeepSeek-V4, MiniMax-M3 and some hybrids.
- The scheduler ran without a model: step times were a law, not a GPU. No row has priorities and
  asynchronous scheduling together, speculative decoding, sliding windows or offloading. `generated`
  counts tokens of requests that ended.
- `simulate --index radix` and `--policy lpm` are rules read in SGLang 0.5.23's source, under vLLM's steps: no
  engine runs that combination, and there is no row to compare with.
- Prefix caches were replayed one request at a time: the engines' own batching, and what requests in
  flight lock, are not in these rows. Policies other than LRU are the engine's own for SGLang alone.
- `ideal` is arithmetic: it is held to 48 sizes derived by hand (tests/golden/sizes.json) and to
  the shapes above, not to an engine.
"""


def beside(name: str) -> Any:
    """A script of this folder as a module, from wherever this one was loaded."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Result(NamedTuple):
    """A file's rows, how many models they are of, and what is off."""

    rows: int
    models: int
    off: list[str]


DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def settings_of(row: Row, block_size: int | None = None) -> VllmSettings:
    """The settings that a row was measured with."""
    return VllmSettings(
        max_model_len=row["max_model_len"],
        tp=row.get("tp", 1),
        dtype=DTYPES[row.get("dtype", "bfloat16")],
        kv_dtype=row.get("kv_cache_dtype", "auto"),
        block_size=block_size,
        max_batched_tokens=row.get("max_num_batched_tokens", 8192),
        batches_in_flight=row["max_in_flight_tokens"] // row.get("max_num_batched_tokens", 8192),
        prefix_caching=row.get("prefix_caching", False),
        hybrid=not row.get("disable_hybrid_kv_cache_manager", False),
        mamba_block_size=row.get("mamba_block_size"),
        kv_memory=row["available_bytes"],
    )


def differences(row: Row, pool: VllmPool) -> Iterator[str]:
    """What of a row is predicted otherwise."""
    expected: Row = {"fits": "error" not in row}
    names = ("bytes_per_block", "one_request_bytes", "num_blocks", "kv_cache_size_tokens")
    expected |= {name: row.get(name) for name in names}
    if "block_size" in row:
        expected["block_size"] = row["block_size"]
    for name, value in expected.items():
        if getattr(pool, name) != value:
            yield f"{name}: {getattr(pool, name)} and not {value}"
    concurrency = None if pool.max_concurrency is None else round(pool.max_concurrency, 6)
    if concurrency != row.get("max_concurrency"):
        yield f"max_concurrency: {concurrency} and not {row.get('max_concurrency')}"
    reason = row.get("error", "").removeprefix("ValueError: ")
    if not pool.reason.startswith(reason) or bool(reason) != bool(pool.reason):
        yield f"reason: {pool.reason!r} and not {reason!r}"
    yield from _groups(row, pool)


def _groups(row: Row, pool: VllmPool) -> Iterator[str]:
    real = [
        (g["n_layers"], g["block_size"], g["page_size_bytes"], g["blocks_per_request"])
        for g in row.get("groups", [])
    ]
    own = [(g.layers, g.block_size, g.page_bytes, g.blocks_per_request) for g in pool.groups]
    if own != real:
        yield f"groups: {own[:4]} … and not {real[:4]} …"
    kinds = [CLASSES.get(g["cls"]) for g in row.get("groups", [])]
    if any(kind and kind != g.kind for kind, g in zip(kinds, pool.groups, strict=False)):
        yield f"kinds: {[g.kind for g in pool.groups]} and not {kinds}"


def model_differences(row: Row, shape: ModelShape) -> list[str]:
    """What of a row of vllm_kv is predicted otherwise."""
    pool = reserve(shape, settings_of(row))
    if pool.block_size != row["block_size"]:
        pool = reserve(shape, settings_of(row, 64))
    return list(differences(row, pool))


def group_differences(row: Row) -> list[str]:
    """A row of vllm_groups."""
    specs = parse_specs(row["specs"])
    return list(differences(row, pool_of(specs, settings_of(row))))


def hf_differences(row: Row, shape: ModelShape) -> list[str]:
    """What of a row of hf_cache is predicted otherwise: bytes by kind of tensor, and in all."""
    dtype = DTYPES_OF[DTYPES[row["dtype"]]]
    layout = CacheLayout(shape=shape, dtype=dtype, kv=KvDtype(k=dtype, v=dtype))
    sequence = transformers.size(
        layout,
        context=row.get("seq_len", row.get("context")),
        encoder=_encoder(row),
        prompt=row["prompt"],
        cache=row["cache"],
    )
    own = {
        k.removesuffix("_bytes"): v for k, v in transformers.fields(sequence, row["batch"]).items()
    }
    off = [
        f"{kind}: {own[kind]} and not {row['bytes'].get(kind, 0)}"
        for kind in own
        if own[kind] != row["bytes"].get(kind, 0)
    ]
    total = row["batch"] * sequence.bytes
    return off if total == row["total"] else [*off, f"total: {total} and not {row['total']}"]


def _encoder(row: Row) -> int:
    length = row.get("enc_len", row.get("encoder"))
    if length != -1:
        return int(length)
    tensors = [t for layer in row["layers"] for t in layer.get("t") or []]
    return next(int(shape[2]) for kind, _, shape, _ in tensors if kind == "cross_k")


def packed(name: str) -> list[Any]:
    """The lines of a gzipped file of tests/data."""
    return [json.loads(line) for line in gzip.decompress((DATA / name).read_bytes()).splitlines()]


def from_tests() -> tuple[dict[str, list[Row]], Callable[[Row], Any]]:
    """The copied rows, and the config of each."""
    head, *hf_rows = packed("hf_cache_rows.jsonl.gz")
    configs = json.loads(gzip.decompress((DATA / "vllm_configs.json.gz").read_bytes()))
    rows = {
        "hf_cache": hf_rows,
        "vllm_kv": packed("vllm_kv_rows.jsonl.gz"),
        "vllm_groups": packed("vllm_groups_rows.jsonl.gz"),
        "scheduler": packed("scheduler.jsonl.gz"),
    }
    return (
        rows,
        lambda row: head["configs"][row["config"]] if "config" in row else configs[row["model"]],
    )


def from_folders(truth: Path, configs: Path) -> tuple[dict[str, list[Row]], Callable[[Row], Any]]:
    """All rows of a truth folder, and the config of each."""

    def config_of(row: Row) -> Any:
        if "config" in row:
            return row["config"]
        return json.loads((configs / f"{row['model'].replace('/', '__')}.json").read_text())

    def read(name: str) -> list[Row]:
        return [json.loads(line) for line in (truth / f"{name}.jsonl").read_text().splitlines()]

    return {name: read(name) for name in WHAT}, config_of


def compare(rows: dict[str, list[Row]], config_of: Callable[[Row], Any]) -> dict[str, Result]:
    """For each file the number of rows, of models, and the rows that are off."""
    table = class_defaults()["types"]
    shapes: dict[str, ModelShape] = {}
    results = {}
    for name, items in rows.items():
        off = []
        for row in items:
            try:
                if name == "scheduler":
                    found = beside(SCHEDULER).engine_differences(row)
                elif "specs" in row and "model" not in row:
                    found = group_differences(row)
                else:
                    config = config_of(row)
                    key = json.dumps(config, sort_keys=True)
                    shape = shapes.setdefault(key, read_model(config, table))
                    found = (hf_differences if name == "hf_cache" else model_differences)(
                        row, shape
                    )
            except KvtoolError as error:
                found = [error.message]
            if found:
                off.append(f"{_called(row)}: {'; '.join(found)}")
        models = {_kind(row) for row in items}
        results[name] = Result(len(items), len(models), off)
    return results


def compare_prefixes(truth: Path, traces: Path) -> Result:
    """The rows of prefix caches; those that are not promised are printed and not counted."""
    script = beside(PREFIX)
    rows = [json.loads(line) for line in truth.read_text().splitlines()]
    found = [(row, script.differences(row, traces)) for row in rows]
    for row, off in found:
        if not script.covered(row):
            print(f"not counted: {script.called(row)}: {'; '.join(off) or 'exact'}")
    counted = [(row, off) for row, off in found if script.covered(row)]
    wrong = [f"{script.called(row)}: {'; '.join(off)}" for row, off in counted if off]
    return Result(len(counted), len({row["engine"] for row, _ in counted}), wrong)


def _kind(row: Row) -> str:
    """What the rows of a file are of."""
    names = ("model_type", "model", "case", "family")
    return str(next(row[name] for name in names if name in row))


def _called(row: Row) -> str:
    if "family" in row:
        return f"scenario {row['id']}"
    if "model_type" in row:
        return f"{row['model_type']} {row['variant']}, {row['cache']}, {row['dtype']}"
    return (
        f"{row.get('model') or row['case']}, tp {row.get('tp', 1)}, {row['max_model_len']} tokens"
    )


def report(results: dict[str, Result]) -> str:
    """docs/accuracy.md."""
    lines = [
        "# Accuracy", "",
        "Written by `python scripts/accuracy.py --write` from the measured rows in `tests/data`; the",
        "tests compare every one of them too. Exact means: no byte, block or token off.", "",
        "| measured | rows | of | exact |", "|---|--:|---|--:|",
    ]  # fmt: skip
    for name, result in results.items():
        what, of = WHAT[name]
        lines.append(
            f"| {what} | {result.rows:,} | {result.models} {of} | {result.rows - len(result.off):,} |"
        )
    lines += ["", "## Rows that are not exact", ""]
    off = [f"- {WHAT[name][0]}: {text}" for name, result in results.items() for text in result.off]
    lines += off or ["None."]
    lines += [
        "",
        *beside(SCHEDULER).figure_2(),
        "",
        *beside(SCHEDULER).savings(),
        "",
        PREFIX_ROWS,
        *beside(PLAN).sections(),
        "",
        LIMITS,
    ]
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Print exact / total of each file and the rows that are off; 1 if any is."""
    if argv in ([], ["--write"]):
        rows, config_of = from_tests()
    elif len(argv) in (2, 3):
        rows, config_of = from_folders(Path(argv[0]), Path(argv[1]))
    else:
        sys.exit(__doc__)
    results = compare(rows, config_of)
    if len(argv) == 3:
        results["prefix"] = compare_prefixes(Path(argv[0]) / "prefix.jsonl", Path(argv[2]))
    if argv == ["--write"]:
        PAGE.write_text(report(results))
    for name, result in results.items():
        for text in result.off:
            print(f"off: {text}")
        print(f"{name}: {result.rows - len(result.off)} of {result.rows} rows exact")
    return 1 if any(result.off for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
