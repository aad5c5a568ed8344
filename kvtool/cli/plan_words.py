"""The words of `kvtool plan` as a PlanQuery: every list is parsed before any model is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvtool.capacity import LONGEST
from kvtool.dtypes import DTYPES, MODEL_DTYPES, dtype_named, parse_kv_dtype
from kvtool.engines import engines_named
from kvtool.errors import INTERRUPTED, KvtoolError, usage_error
from kvtool.plan_model import PlanModel
from kvtool.plan_query import UTILIZATION, VERSION, PlanQuery, gpus_named
from kvtool.size_row import DS_MLA, VllmOptions
from kvtool.sweep_file import is_sweep
from kvtool.units import MAX_LIST, parse_bytes, parse_count, parse_counts
from kvtool.weights.counted import in_words

MAX_BATCH, MAX_PARALLEL = 2**20, 2**16
ALONE = ("solve", "levers", "ways", "workload", "trace", "disaggregate", "tiers")
"""What makes of a row more than its case says."""
SOLVED = ("context", "batch", "gpus", "kv-dtype", "utilisation")
SPELLED = {"utilization": "utilisation", "kv_dtype": "kv-dtype", "users": "batch", "gpu": "gpus"}


def query_of(given: Mapping[str, Any]) -> PlanQuery:
    """What is asked of each model."""
    if given["gpu"] is None:
        raise usage_error("plan needs a GPU", "add --gpu h100:8, a list, or --gpu all")
    if not given["models"]:
        raise usage_error("plan needs a MODEL", "see kvtool plan --help")
    dtype, efficiency = given["dtype"], _efficiency(given["efficiency"])
    return PlanQuery(
        gpus=gpus_named(given["gpu"]),
        ranked=is_ranked(given),
        engines=engines_named(given["engine"]),
        tps=_counts(given["tp"], "--tp", MAX_PARALLEL) or (None,),
        pps=_counts(given["pp"], "--pp", MAX_PARALLEL) or (1,),
        dps=_counts(given["dp"], "--dp", MAX_PARALLEL) or (None,),
        dcp=parse_count(given["dcp"], name="--dcp", high=MAX_PARALLEL),
        expert_parallel=given["ep"],
        kv_dtypes=_kv_dtypes(given["kv_dtype"], engines_named(given["engine"])),
        dtype=None if dtype is None else dtype_named(dtype, flag="--dtype", among=MODEL_DTYPES),
        utilizations=_shares(given["gpu_memory_utilization"]),
        contexts=_counts(given["context"], "--context", LONGEST),
        users=_counts(given["batch"], "--batch", MAX_BATCH) or (None,),
        max_num_seqs=_count(given["max_num_seqs"], "--max-num-seqs", MAX_BATCH),
        max_batched_tokens=_count(given["max_batched_tokens"], "--max-batched-tokens"),
        enforce_eager=given["enforce_eager"],
        reserve=_bytes(given["reserve"], "--reserve") or 0,
        weights=_weights(given["weights"]),
        version=_version(given["engine_version"]),
        kv_memory=_bytes(given["kv_memory"], "--kv-memory"),
        price=_price(given["price"]),
        block_size=_count(given["block_size"], "--block-size", MAX_BATCH),
        encoder_tokens=_count(given["encoder_tokens"], "--encoder-tokens", low=0),
        allow_long=given["allow_long"],
        read_efficiency=efficiency[0],
        compute_efficiency=efficiency[1],
        efficiency_basis="assumed" if efficiency[0] is None else "given",
        vllm=VllmOptions(prefix_caching=bool(given["prefix_caching"]), hybrid=given["hybrid"]),
    )


def solved(typed: str | None) -> str | None:
    """What --solve looks for."""
    if typed is None:
        return None
    word = typed.strip().lower()
    word = SPELLED.get(word, word)
    if word not in SOLVED:
        from kvtool.errors import did_you_mean

        raise usage_error(
            f"--solve: '{typed[:40]}' is not known",
            f"it looks for {', '.join(SOLVED)}.{did_you_mean(word, SOLVED)}",
        )
    return word


def interrupted(path: Path | None, given: Mapping[str, Any]) -> BaseException:
    """Of a grid whose rows are kept as they come; anything else has written nothing."""
    if path is None or not path.exists() or not is_sweep(path):
        return KeyboardInterrupt()
    error = KvtoolError(
        f"interrupted: the rows that were made are in {path}",
        "run the same again: it goes on from there",
        code="interrupted",
        exit_code=INTERRUPTED,
    )
    error.params = dict(given)
    return error


def is_ranked(given: Mapping[str, Any]) -> bool:
    """Whether all GPUs that are known are asked for."""
    return bool(given["gpu"].strip().lower() == "all")


def is_grid(given: Mapping[str, Any], path: Path | None) -> bool:
    """Whether rows are spread over processes or kept in a file; usage error where a row is more than a case."""
    flags = {"--jobs": given["jobs"] != 1, "--backend": given["backend"] is not None}
    asked = next((flag for flag, there in flags.items() if there), None)
    alone = next((f"--{name.replace('_', '-')}" for name in ALONE if given[name]), None)
    alone = alone or ("--gpu all" if is_ranked(given) else None)
    if alone is None:
        return asked is not None or (path is not None and path.suffix.lower() == ".jsonl")
    if path is not None and is_sweep(path):
        raise usage_error(
            f"-o {path}: it holds a grid, and {alone} would replace it", "name another file"
        )
    if asked is not None:
        raise usage_error(
            f"{asked} is for lists of plans, and {alone} is made in one process",
            f"leave out {asked}",
        )
    return False


def weights_in(name: str | None, model: PlanModel, query: PlanQuery) -> tuple[PlanModel, PlanQuery]:
    """The model as if its weights were quantised (--weights-dtype)."""
    if name is None:
        return model, query
    from kvtool.levers.weights import quantised, why_not
    from kvtool.weights.usual import LEFT_MORE, SCHEMES

    if name not in SCHEMES:
        raise usage_error(
            f"--weights-dtype: '{name[:40]}' is not known", f"it is {' or '.join(SCHEMES)}"
        )
    if why := why_not(model, query):
        raise usage_error(f"{model.subject.name}: --weights-dtype {name}: {why}", "leave it out")
    smaller, query = quantised(model, query, name)
    whole, fewer = (
        in_words(model.subject.name, one.stored) for one in (model, smaller) if one.stored
    )
    notes = [fewer if text == whole else text for text in model.notes]
    notes.append(f"--weights-dtype {name} is an estimate: {LEFT_MORE}")
    if name == "fp8":  # which vLLM does itself as it loads
        return replace(smaller, quantization=name, notes=tuple(notes)), query
    return replace(smaller, repository=f"<{model.repository} in {name}>", notes=tuple(notes)), query


def _counts(text: str | None, name: str, high: int | None = None) -> tuple[int, ...]:
    if text is None:
        return ()
    return tuple(parse_counts(text, name=name, **({"high": high} if high else {})))


def _count(text: str | None, name: str, high: int | None = None, low: int = 1) -> int | None:
    if text is None:
        return None
    return parse_count(text, name=name, low=low, **({"high": high} if high else {}))


def _bytes(text: str | None, name: str) -> int | None:
    return None if text is None else parse_bytes(text, name=name)


def _weights(text: str | None) -> int | None:
    """Bytes, or those of the tensors in a folder or of a Hub id."""
    if text is None:
        return None
    if re.match(r"[0-9.]+\s*[a-zA-Z]*$", text.strip()):
        count = parse_bytes(text, name="--weights")
        if not count:
            raise usage_error(
                "--weights: a model has some", "write --weights 140GiB, or leave it out"
            )
        return count
    from kvtool.weights.headers import headers_of

    return headers_of(text).bytes


def _version(text: str | None) -> str | None:
    if text is None:
        return VERSION
    if text.strip().lower() == "any":
        return None
    if not re.fullmatch(r"v?[0-9]{1,3}(\.[0-9]{1,3}){0,3}", text.strip()):
        raise usage_error(
            f"--engine-version: '{text[:40]}' is no version", "write one such as 0.32, or any"
        )
    return text.strip()


def _kv_dtypes(text: str, engines: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(_parts(text, "--kv-dtype"))
    for name in names:
        if name.lower() == DS_MLA and engines != ("vllm",):
            raise usage_error(f"--kv-dtype {DS_MLA} is vLLM's own layout", "add --engine vllm")
        if name.lower() != DS_MLA:
            parse_kv_dtype(name, auto=DTYPES["bf16"])
    return names


def _shares(text: str | None) -> tuple[float, ...]:
    if text is None:
        return (UTILIZATION,)
    parts = _parts(text, "--gpu-memory-utilization")
    return tuple(_share(part, "--gpu-memory-utilization") for part in parts)


def _parts(text: str, name: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > MAX_LIST:
        raise usage_error(f"{name}: more than {MAX_LIST:,} values", "give a shorter list")
    return parts


def _share(text: str, name: str) -> float:
    number = re.fullmatch(r"[0-9]?\.?[0-9]{1,9}", text.strip())
    if number is None or not 0.001 <= float(text) <= 1:
        raise usage_error(
            f"{name}: '{text[:40]}' is no share",
            f"give a part from 0.001 to 1, such as {name} 0.9",
        )
    return float(text)


def _efficiency(text: str | None) -> tuple[float | None, float | None]:
    """Of reading, and of computing."""
    if text is None:
        return None, None
    parts = [_share(part, "--efficiency") for part in text.split(",")]
    if len(parts) > 2:
        raise usage_error(
            "--efficiency takes two shares at most", "of bandwidth and of the rate: 0.8,0.5"
        )
    return parts[0], parts[1] if len(parts) > 1 else None


def _price(each: float | None) -> float | None:
    if each is not None and not 1e-6 <= each < 1e6:
        raise usage_error(f"--price: {each} is no price", "give the USD that a GPU costs an hour")
    return each
