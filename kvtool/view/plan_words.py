"""What is said of a plan: the verdict first, why, what to do, then what a step costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvtool.run import Row
from kvtool.units import format_bytes
from kvtool.view.plan_speed import cost, intensity, step
from kvtool.view.words import counted, share

BINDS = {
    "weights": "the weights alone are more than an engine may use of a GPU",
    "overhead": "activations and what else the engine keeps leave nothing for the cache",
    "context": "not one request of this length fits",
    "users": "fewer requests fit than are asked for",
    "max_num_seqs": "the engine's own limit binds, not the memory (--max-num-seqs)",
    "kv": "memory for the cache binds",
}
SPARSE = 0.6
"""Models of which a token meets fewer parameters have experts."""
SOLVED = {
    "context": ("Context", "token"), "batch": ("Batch", "request"), "gpus": ("GPUs", ""),
    "kv-dtype": ("KV dtype", ""), "utilisation": ("Utilisation", ""),
}  # fmt: skip
"""What --solve looks for, and what it counts."""


def on(row: Row) -> str:
    """`8 × h100-sxm (tp 8)`."""
    split = [f"{name} {row[name]}" for name in ("tp", "pp", "dp", "dcp") if row[name] > 1]
    return f"{row['gpus']:,} × {row['gpu']}" + (f" ({', '.join(split)})" if split else "")


def lead(row: Row) -> tuple[str, ...]:
    """The answer: what was looked for, then the verdict."""
    return tuple(text for text in (_solved(row), verdict(row)) if text)


def _solved(row: Row) -> str:
    """The one that was missing."""
    found = row.get("solved")
    if found is None or found["value"] is None:
        return ""
    name, noun = SOLVED[found["what"]]
    value = row["kv_dtype"] if found["what"] == "kv-dtype" else found["value"]  # auto is no dtype
    if noun:
        shown = counted(value, noun)
    else:
        shown = f"{value:,}" if isinstance(value, int | float) else value
    return f"{name}: {shown} ({found['flags']})."


def verdict(row: Row) -> str:
    """Whether it fits, and what binds."""
    lengths = _lengths(row)
    if not row["fits"]:
        asked = f"{row['model']} for {_users(row)} of {lengths} on {on(row)}"
        if not row["missing_bytes"]:
            return f"Does not run: {asked}: --max-num-seqs {row['max_num_seqs']:,} lets a replica run no more."
        return (
            f"Does not fit: {asked} lacks "
            f"{format_bytes(row['missing_bytes'])} on each GPU: {BINDS[row['binds']]}{_would(row)}."
        )
    many, runs = share(row["max_concurrency"]), row["runs"]
    whole = row["whole_requests"]
    fewer = runs < whole["best"]
    limit = f", of which {runs:,} run" if fewer else ""
    low = whole["low"]
    doubt = f", {low:,} if the estimates are off" if fits_in_doubt(row) else ""
    return (
        f"Fits: {many} requests of {lengths} at a time on {on(row)}{limit}, by the best estimate"
        f"{doubt}; {BINDS[row['binds']]}."
    )


def _lengths(row: Row) -> str:
    basis = row["context_basis"]
    return counted(row["context_tokens"], "token") + (f" ({basis})" if basis else "")


def _asked(row: Mapping[str, Any]) -> int:
    """Requests that are to fit: one a replica where nobody says."""
    return int(row["dp"] if row["users"] is None else row["users"])


def fits_in_doubt(row: Mapping[str, Any]) -> bool:
    """Whether it fits by the best estimate of the memory, but not by the lowest."""
    return bool(row["fits"] and row["whole_requests"]["low"] < _asked(row))


def _would(row: Row) -> str:
    """Where the highest estimate says otherwise."""
    high = row["whole_requests"]["high"]
    if high < _asked(row):
        return ""
    return f" by the best estimate, {high:,} would if the estimates are off"


def _users(row: Row) -> str:
    return "a request" if row["users"] is None else counted(row["users"], "request")


def refusal(rows: Sequence[Row]) -> tuple[str, str]:
    """Message and hint where nothing fits: the nearest miss, and what would do."""
    row = min(rows, key=lambda one: int(one["missing_bytes"]))
    ways = [one["flags"] for one in row.get("alternatives") or () if one["fits"]]
    hint = "; or ".join(ways[:3])
    return verdict(row).rstrip("."), hint or (
        "give it more GPUs, another KV dtype, or a shorter context"
    )


def about(row: Row) -> list[str]:
    """Why, and what it costs."""
    said = [_tried(row), _grows(row), _range(row), _longest(row)]
    if row["fits"]:  # nothing is said of steps that cannot be made
        said += [step(row), intensity(row), cost(row), *without_speed([row]), _command(row)]
    return [text for text in said if text]


def _tried(row: Row) -> str:
    """What was changed on the same GPUs, and does not suffice."""
    ways = [
        one["flags"]
        for one in row.get("alternatives") or ()
        if not one["fits"] and (one["gpu"], one["gpus"]) == (row["gpu"], row["gpus"])
    ]
    return f"Not enough on the same GPUs: {'; '.join(ways)}." if ways else ""


def _grows(row: Row) -> str:
    """Weights are there once; the cache grows with every token and every user."""
    many = row["users"] or 1
    one, ranks = row["cache_bytes"] // many, row["tp"] * row["pp"]
    cache = f"{_users(row)} of {counted(row['context_tokens'], 'token')} take{'s' * (many == 1)} "
    cache += format_bytes(row["cache_bytes"])
    cache += f", {format_bytes(one)} each" if many > 1 else ""
    held = format_bytes(row["request_bytes"])
    if ranks > 1:
        cache += f", of which each GPU{' of its replica' * (row['dp'] > 1)} holds {held}"
    elif held != format_bytes(one):
        cache += f" ({held} each in the engine's blocks)"
    if not row["weights_bytes"]:
        return f"The cache grows with requests: {cache}."
    return (
        f"Weights take {format_bytes(row['weights_bytes'])} of each GPU{_active(row)}, however many requests run; the cache "
        f"grows with them: {cache}."
    )


def _active(row: Row) -> str:
    """Of a mixture of experts, all of which are resident."""
    whole, active = row["parameters"], row["active_parameters"]
    if not whole or active > SPARSE * whole:
        return ""
    return f" (all of {whole / 1e9:,.4g} billion parameters, of which a token meets {active / 1e9:,.3g})"


def _range(row: Row) -> str:
    budget = row["kv_budget_bytes"]
    low, best, high = budget["low"], budget["best"], budget["high"]
    if low == high:
        return ""
    if best <= 0:
        return f"Nothing is left for the cache: {format_bytes(-best)} are missing on each GPU before it."
    return (
        f"For the cache a GPU has {format_bytes(best)}, and {format_bytes(max(0, low))} to "
        f"{format_bytes(high)} if the estimates are off."
    )


def _longest(row: Row) -> str:
    longest = row["max_context"]
    if longest is None or not row["fits"]:
        return ""
    who = "one request" if row["users"] is None else f"{counted(row['users'], 'request')} at a time"
    return f"The longest context for {who}: {longest:,} tokens."


def without_speed(rows: Sequence[Row]) -> list[str]:
    """Why plans that fit have no TPOT: nobody says how fast the GPU computes, or what a step reads."""
    dark = [row for row in rows if row["fits"] and row["tpot_s"] is None]
    rated = [row for row in dark if row.get("efficiency")]
    gpus = list(dict.fromkeys(row["gpu"] for row in dark if row not in rated))
    models = list(dict.fromkeys(row["model"] for row in rated))
    said = []
    if gpus:
        dtypes = {row.get("dtype") for row in dark} - {None}
        dtype = f" in {dtypes.pop()}" if len(dtypes) == 1 else ""
        said.append(
            f"No TPOT or tokens/s where the GPU's peak rate{dtype} is not known: {', '.join(gpus)}."
        )
    if models:
        said.append(f"No TPOT or tokens/s: nothing says what a step reads of {', '.join(models)}.")
    return said


def _command(row: Row) -> str:
    return f"To start it: {row['command']}" if row["fits"] and row.get("command") else ""


def running(row: Row) -> Row:
    """The row, or nothing in it where it does not fit: what cannot run has no speed."""
    return row if row["fits"] else dict.fromkeys(row)
