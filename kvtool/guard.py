"""What a stranger's config may ask of transformers: no code, no network, no endless work, no noise."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

from kvtool.errors import KvtoolError

COUNTED = re.compile(r"layers?$|depths?$|blocks?$|experts$|codebooks$|stages?$")
DROPPED = re.compile(
    r"attn_implementation|experts_implementation|^num_labels$|^id2label$|^label2id$|^return_dict$"
    r"|^use_return_dict$|^quantization_config$|^auto_map$|^torchscript$|^output_(attentions|hidden)"
)
MAX_MODULES = 4096
MAX_EXPERTS = 100_000
DEADLINE_S = 120
"""What any preset needs ten times over."""


def refuse_huge(config: Mapping[str, Any]) -> None:
    """Modules are objects, also without weights: a million layers of some tower are not built."""
    counts = {"layers": 1, "experts": 1}
    for key, value in config.items():
        if isinstance(value, Mapping):
            refuse_huge(value)
        elif COUNTED.search(str(key)):
            count = _count(value)
            kind = "experts" if str(key).endswith("experts") else "layers"
            counts[kind] = max(counts[kind], count)
            if count > MAX_MODULES:
                raise _too_many(f"{str(key)[:60]} = {count:,}", MAX_MODULES)
    if counts["layers"] * counts["experts"] > MAX_EXPERTS:
        raise _too_many(
            f"{counts['layers']:,} layers of {counts['experts']:,} experts", MAX_EXPERTS
        )


def _count(value: Any) -> int:
    """A number, or the sum of a list of them (`depths`)."""
    if isinstance(value, list):
        return sum(_count(item) for item in value[: MAX_MODULES + 1])
    return int(value) if isinstance(value, int | float) and 0 < value < 2**62 else 0


def _too_many(what: str, most: int) -> KvtoolError:
    return KvtoolError(
        f"{what}: at most {most:,} are built",
        "correct the config, or leave the check out",
        code="not_buildable",
    )


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config without what has nothing to do with its cache and names code, labels or kernels.

    `attn_implementation` may name a repository of native code, num_labels may be a billion.
    """
    out: dict[str, Any] = {}
    for key, value in config.items():
        if DROPPED.search(str(key)):
            continue
        if isinstance(value, Mapping):
            value = plain_config(value)
        elif isinstance(value, float) and value.is_integer() and COUNTED.search(str(key)):
            value = int(value)
        out[str(key)] = value
    vocab, pad = out.get("vocab_size"), out.get("pad_token_id")
    if isinstance(vocab, int) and isinstance(pad, int) and not 0 <= pad < vocab:
        out["pad_token_id"] = None
    return out


class _Late(BaseException):
    """The deadline: no class of transformers may take it for one of its own errors."""


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """An end to what a hostile or an endless model does, where there are alarms."""
    alarm = getattr(signal, "SIGALRM", None)
    if alarm is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: object) -> None:
        raise _Late

    before = signal.signal(alarm, late)
    signal.alarm(seconds)
    try:
        yield
    except _Late:
        raise KvtoolError(
            f"transformers needs more than {seconds} s for this model and this context",
            "choose a shorter --context; recurrent models go token by token",
            code="not_buildable",
        ) from None
    finally:
        signal.alarm(0)
        signal.signal(alarm, before)


@contextmanager
def quiet() -> Iterator[None]:
    """Without the words of transformers: stdout is for data, and its warnings are about weights."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    words = sys.modules.get("transformers.utils.logging")
    bars = words is not None and words.is_progress_bar_enabled()
    if words is not None:
        words.disable_progress_bar()
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
        if words is not None and bars:
            words.enable_progress_bar()


@contextmanager
def stdout_for_data() -> Iterator[None]:
    """What libraries print, from C too, goes to stderr: stdout has one object and nothing else."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # it is closed: nothing can be written there
        yield
        return
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def offline() -> Iterator[None]:
    """A config may name a backbone on the Hub: it is not fetched."""
    constants = sys.modules.get("huggingface_hub.constants")
    flag = "HF_HUB_OFFLINE"
    before = getattr(constants, flag, None), os.environ.get(flag)
    os.environ[flag] = "1"
    if constants is not None:
        setattr(constants, flag, True)
    try:
        yield
    finally:
        if constants is not None:
            setattr(constants, flag, before[0])
        if before[1] is None:
            del os.environ[flag]
        else:
            os.environ[flag] = before[1]
