"""Numba, kept at arm's length: one decorator, and whether a first run has to compile."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

# Before numba is imported: at its own level 3 a first run takes half a second more and later ones gain
# nothing, since every part is put into its callers anyway.
os.environ.setdefault("NUMBA_OPT", "1")

import numba

_njit: Any = numba.njit
_Function = TypeVar("_Function", bound=Callable[..., Any])
# Without numba's count of references (_nrt), since nothing here allocates, and without its rewriting of
# array expressions, since there are none: a tenth less to compile.
_OPTIONS: dict[str, Any] = {
    "nogil": True, "error_model": "numpy", "_nrt": False, "no_rewrites": True,
}  # fmt: skip


def compiled(function: _Function) -> _Function:
    """Compile when first called and keep the machine code on disk, where there is a place for it."""
    try:
        made = _njit(cache=True, no_cfunc_wrapper=True, **_OPTIONS)(function)
        cache = getattr(made, "_cache", None)
        if cache is not None:  # as it is where NUMBA_DISABLE_JIT says so
            _make_careful(cache)
        return made
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return _njit(no_cfunc_wrapper=True, **_OPTIONS)(function)


def part(function: _Function) -> _Function:
    """A part of compiled functions, put into its callers: a step runs through dozens of parts, and
    to call each costs more than what it does. Python cannot call it, which halves the time to compile.
    """
    flags = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": True}
    return _njit(**flags, **_OPTIONS)(function)


def _make_careful(cache: Any) -> None:
    """Machine code on disk is a help, never a condition: what is damaged there is made anew."""
    # numba looks at the function's own file alone; its parts stand in the others.
    cache._cache_file._source_stamp = _sources()
    load, save = cache.load_overload, cache.save_overload

    def load_or_forget(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except Exception:  # noqa: BLE001 - whatever a damaged file makes pickle raise
            with suppress(OSError):
                Path(cache._cache_file._index_path).unlink(missing_ok=True)
            return None

    def save_if_possible(*arguments: Any) -> None:
        with suppress(OSError):  # a full disk, a quota
            save(*arguments)

    cache.load_overload, cache.save_overload = load_or_forget, save_if_possible


def _sources() -> str:
    """What the machine code is made from: all files of this folder."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def must_compile(function: Callable[..., Any]) -> bool:
    """Whether no machine code of a compiled function is on disk yet."""
    place = getattr(getattr(function, "_cache", None), "cache_path", None)
    name = f"{Path(function.__code__.co_filename).stem}.{function.__name__}-*.nbi"
    return place is None or not any(Path(place).glob(name))
