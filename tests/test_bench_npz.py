"""Inputs and outputs as a file: what is written is read again, what a stranger wrote is checked."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_cases import CPU, case

from kvtool.bench.attention import data as cases
from kvtool.bench.attention import npz
from kvtool.errors import KvtoolError

torch = pytest.importorskip("torch")


def arrays(**changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {
        "q": rng.standard_normal((2, 4, 64)).astype(np.float32),
        "k_cache": rng.standard_normal((6, 16, 2, 64)).astype(np.float32),
        "v_cache": rng.standard_normal((6, 16, 2, 64)).astype(np.float32),
        "block_table": np.array([[5, 0, -1], [2, 1, 4]], dtype=np.int64),
        "lengths": np.array([20, 48], dtype=np.int64),
    }
    return {name: value for name, value in (found | changes).items() if value is not None}


def saved(path: Path, **changes: Any) -> Path:
    np.savez(path / "in.npz", **arrays(**changes))
    return path / "in.npz"


@pytest.mark.parametrize("layout", ["nhd", "hnd"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
def test_what_is_dumped_can_be_read_again(tmp_path: Path, dtype: str, layout: str) -> None:
    one = case(kv_dtype=dtype, layout=layout, pattern="shuffled", batch=3, skew=2)
    data = cases.make(one, CPU, seed=3)
    np.savez(tmp_path / "dump.npz", **npz.outputs(data, {}))
    found = npz.read_inputs(tmp_path / "dump.npz")
    assert found.kv_dtype == dtype
    assert found.lengths == one.lengths
    assert torch.equal(found.q, data.q)
    used = data.table[data.table >= 0].long().sort().values
    assert torch.equal(found.k_cache, data.k_cache[0][used])
    again = cases.make_from(
        found.case(layout=layout, threads=1, num_splits=None, num_stages=None), CPU, found
    )
    for row, tokens in enumerate(one.lengths):
        assert torch.equal(again.k[0][row, :tokens], data.k[0][row, :tokens])
        assert torch.equal(again.v[0][row, :tokens], data.v[0][row, :tokens])
    assert again.scale == pytest.approx(data.scale)


def test_a_scale_of_its_own_is_kept(tmp_path: Path) -> None:
    found = npz.read_inputs(saved(tmp_path, scale=np.float64(0.5)))
    made = cases.make_from(
        found.case(layout="hnd", threads=1, num_splits=None, num_stages=None), CPU, found
    )
    assert made.scale == 0.5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"q": None}, "no array q"),
        ({"q": np.zeros((2, 4, 32), np.float32)}, "do not fit together"),
        ({"q": np.zeros((2, 4), np.float32)}, "dimensions"),
        ({"q": np.zeros((2, 3, 64), np.float32)}, "no multiple"),
        ({"q": np.zeros((2, 4, 64), np.float64)}, "float32, float16"),
        ({"kv_dtype": np.str_("bf16")}, "float32, float16"),
        ({"lengths": np.array([20, 49])}, "lengths"),
        ({"lengths": np.array([-1, 2])}, "lengths"),
        ({"lengths": np.array([0, 0])}, "empty"),
        ({"lengths": np.array([20])}, "one batch"),
        ({"lengths": np.array([2.0, 3.0])}, "not integers"),
        ({"block_table": np.array([[6, 0, 0], [2, 1, 4]])}, "outside 0 to 5"),
        ({"block_table": np.array([[-1, 0, 0], [2, 1, 4]])}, "outside 0 to 5"),
        ({"k_cache": np.zeros((6, 24, 2, 64), np.float32),
          "v_cache": np.zeros((6, 24, 2, 64), np.float32)}, "blocks of 24"),
        ({"scale": np.float64("nan")}, "scale is nan"),
        ({"scale": np.float64(1e300)}, "scale is"),
        ({"scale": np.array([0.9])}, "scale is no number"),
        ({"scale": np.str_("0.9")}, "scale is no number"),
        ({"scale": np.complex128(1)}, "scale is no number"),
    ],
)  # fmt: skip
def test_what_would_read_elsewhere_is_refused(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(KvtoolError, match=said) as caught:
        npz.read_inputs(saved(tmp_path, **changes))
    assert caught.value.code == "bad_inputs"
    assert "\n" not in caught.value.message


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("executed",))

    np.savez(tmp_path / "bomb.npz", q=np.array([Bomb()], dtype=object))
    (tmp_path / "raw.npz").write_bytes(pickle.dumps({"q": 1}))
    (tmp_path / "text.npz").write_text("no zip at all")
    for name in ("bomb.npz", "raw.npz", "text.npz", "absent.npz"):
        with pytest.raises(KvtoolError, match="--inputs"):
            npz.read_inputs(tmp_path / name)


def test_what_unpacks_to_more_than_there_is_room_for_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path)
    monkeypatch.setattr(npz, "free_memory", lambda: 1000)
    with pytest.raises(KvtoolError, match="unpacks to"):
        npz.read_inputs(path)
