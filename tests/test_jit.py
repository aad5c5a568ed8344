"""Levels of LLVM and machine code on disk: each function's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from kvtool import jit


def test_a_level_ends_with_the_compile_that_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = numba.config.OPT, []

    def double(x: int) -> int:
        return 2 * x

    made: Any = jit.vectorised(double)
    compile_once = made._compiler.compile
    monkeypatch.setattr(
        made._compiler, "compile", lambda *a: seen.append(int(numba.config.OPT)) or compile_once(*a)
    )
    monkeypatch.setattr(made._cache, "load_overload", lambda *a: None)
    assert made(21) == 42
    assert seen == [3]
    assert before == numba.config.OPT


def test_vectorised_sums_keep_infinities_and_nan(tmp_path: Path) -> None:
    from kvtool.bench.cpu.attention import paged_decode

    cache = np.zeros((1, 1, 16, 16), np.float32)
    cache[0, 0, 3] = np.nan  # a token that is seen
    q, lse = np.ones((1, 1, 16), np.float32), np.zeros((1, 1), np.float32)
    out = q.copy()
    paged_decode(q, cache, cache, np.zeros((1, 1), np.int32), np.array([5]), out, lse, scale=1.0)
    assert np.isnan(out).all()


def test_machine_code_is_made_from_all_files_of_its_folder(tmp_path: Path) -> None:
    stamp = jit._stamp.__wrapped__  # it is kept: files do not change while a process runs
    (tmp_path / "one.py").write_text("x = 1\n")
    (tmp_path / "notes.txt").write_text("x = 1\n")
    before = stamp(tmp_path)
    (tmp_path / "notes.txt").write_text("x = 2\n")
    assert stamp(tmp_path) == before
    (tmp_path / "two.py").write_text("x = 2\n")
    assert stamp(tmp_path) != before
