"""Numba, kept at arm's length: its decorators, and whether a first run has to compile."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

# Before numba is imported: at its own level 3 a first run takes half a second more and later ones gain
# nothing, since every part is put into its callers anyway. What gains asks for it: `vectorised`.
os.environ.setdefault("NUMBA_OPT", "1")

import numba
from numba import types as types
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.extending import intrinsic as _intrinsic

_njit: Any = numba.njit
_config: Any = numba.config
_Function = TypeVar("_Function", bound=Callable[..., Any])
# Without numba's count of references (_nrt), since nothing here allocates, and without its rewriting of
# array expressions, since there are none: a tenth less to compile.
_OPTIONS: dict[str, Any] = {
    "nogil": True, "error_model": "numpy", "_nrt": False, "no_rewrites": True,
}  # fmt: skip
# What a sum in any order needs, and a fused multiply-add. Infinities and NaN keep their meaning.
_FAST = {"fastmath": {"reassoc", "contract", "nsz", "arcp"}}
_FOR_CALLERS = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "forceinline": True}


def compiled(function: _Function) -> _Function:
    """Compile when first called and keep the machine code on disk, where there is a place for it.

    It is made anew when any file of the function's subpackage of kvtool has changed.
    """
    return _kept(function, {})


def part(function: _Function) -> _Function:
    """A part of compiled functions, put into its callers: a step runs through dozens of parts, and
    to call each costs more than what it does. Python cannot call it, which halves the time to compile.
    """
    return _njit(**_FOR_CALLERS, **_OPTIONS)(function)


def vectorised(function: _Function) -> _Function:
    """Like `compiled`, at LLVM's level 3 and with sums in any order: loops become vector loops."""
    made: Any = _kept(function, _FAST)
    compile_as_asked = getattr(made, "compile", None)
    if compile_as_asked is None:  # NUMBA_DISABLE_JIT
        return function

    def compile_at_level_3(signature: Any) -> Any:
        with _level_3():
            return compile_as_asked(signature)

    made.compile = compile_at_level_3
    kept: _Function = made
    return kept


def vectorised_part(function: _Function) -> _Function:
    """A part of vectorised functions, put into its callers."""
    return _njit(**_FOR_CALLERS, **_OPTIONS, **_FAST)(function)


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function for compiled ones that writes LLVM's instructions itself: what numba has no word for."""
    made: Callable[..., Any] = _intrinsic(function)
    return made


def must_compile(function: Callable[..., Any]) -> bool:
    """Whether no machine code of a compiled function is on disk yet."""
    place = getattr(getattr(function, "_cache", None), "cache_path", None)
    name = f"{Path(function.__code__.co_filename).stem}.{function.__name__}-*.nbi"
    return place is None or not any(Path(place).glob(name))


def _kept(function: _Function, more: dict[str, Any]) -> _Function:
    options = {"no_cfunc_wrapper": True, **_OPTIONS, **more}
    try:
        made = _njit(cache=True, **options)(function)
        kept = getattr(made, "_cache", None)
        if kept is not None:  # as it is where NUMBA_DISABLE_JIT says so
            _make_careful(kept, _stamp(_around(Path(function.__code__.co_filename))))
        return made
    except RuntimeError:  # neither the package's folder nor the user's cache can be written
        return _njit(**options)(function)


@contextmanager
def _level_3() -> Iterator[None]:
    """LLVM's passes at level 3. numba keeps one level for the whole process and has no other way.

    Up to 0.61 the passes are made once and kept (`_mpm_full`); later they are made for each function.
    """
    with global_compiler_lock:
        level, codegen = _config.OPT, cpu_target.target_context.codegen()
        passes = getattr(codegen, "_mpm_full", None)
        _config.OPT = type(level)(3)
        try:
            if passes is not None:
                codegen._mpm_full = codegen._module_pass_manager()
            yield
        finally:
            _config.OPT = level
            if passes is not None:
                codegen._mpm_full = passes


def _make_careful(kept: Any, stamp: str) -> None:
    """Machine code on disk is a help, never a condition: what is damaged there is made anew."""
    # numba looks at the function's own file alone; its parts stand in the others.
    kept._cache_file._source_stamp = stamp
    load, save = kept.load_overload, kept.save_overload

    def load_or_forget(*arguments: Any) -> Any:
        try:
            return load(*arguments)
        except Exception:  # noqa: BLE001 - whatever a damaged file makes pickle raise
            with suppress(OSError):
                Path(kept._cache_file._index_path).unlink(missing_ok=True)
            return None

    def save_if_possible(*arguments: Any) -> None:
        with suppress(OSError):  # a full disk, a quota
            save(*arguments)

    kept.load_overload, kept.save_overload = load_or_forget, save_if_possible


def _around(file: Path) -> Path:
    """The folder whose files call each other: of kvtool/sim/blocks/kernel.py it is kvtool/sim."""
    package = Path(__file__).parent
    inside = file.is_relative_to(package) and len(file.relative_to(package).parts) > 1
    return package / file.relative_to(package).parts[0] if inside else file.parent


@cache
def _stamp(folder: Path) -> str:
    """What machine code is made from: all files of a folder, and this one, which says how."""
    files = [*sorted(folder.rglob("*.py")), Path(__file__)]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
