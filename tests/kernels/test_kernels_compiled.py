"""What triton makes of the kernels, compiled ahead of time for chips that are not here.

The paged kernel must lose nothing to its contiguous twin that decides the speed: 128-bit loads and
copies in flight; and must spill nothing, within each chip's registers and shared memory.
"""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the kernels need torch")
pytest.importorskip("triton", reason="the kernels need triton, which is there on Linux only")

from kernel_launches import decode_launch, empty  # noqa: E402

from kvtool.kernels import compiled, decode, merge, read, store  # noqa: E402
from kvtool.kernels.compiled import ARCHS, MAX_SHARED_BYTES, MachineCode  # noqa: E402
from kvtool.kernels.launch import is_interpreted  # noqa: E402

pytestmark = pytest.mark.skipif(
    is_interpreted(decode._decode), reason="TRITON_INTERPRET is set: nothing can be compiled"
)

BLOCK_SIZES = (1, 16, 64, 256)
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
# Three programs of 128 threads on a multiprocessor of NVIDIA's. A query tile of 192 or 256 takes 64
# registers of every thread, as each warp needs all of it: then two fit, as the tiles do.
MAX_REGISTERS = 168
MAX_REGISTERS_WIDE = 200
# ptxas sometimes parks a value or two (a thread's lane bits) in memory around the loop over tiles. With
# the releases that are pinned, heads of 128 in 16 bits have none; elsewhere so many bytes may be.
PARKED_BYTES = 8
PINNED = ("3.6.0", "3.7.1")


@lru_cache
def code(walk: str, arch: str, **options: Any) -> MachineCode:
    """A decode kernel on arch."""
    dtype = getattr(torch, options.pop("dtype", "bfloat16"))
    return compiled.machine_code(decode_launch(walk, arch=arch, dtype=dtype, **options), arch)


def faults(
    built: MachineCode, twin: MachineCode, *, head_dim: int = 128, dtype: str = "bfloat16"
) -> list[str]:
    """Which gates a paged kernel fails."""
    is_strict = head_dim == 128 and dtype != "float32" and built.triton in PINNED
    most = MAX_REGISTERS if head_dim <= 128 else MAX_REGISTERS_WIDE
    gates = {
        "spills": built.loop_spills == 0
        and built.spill_bytes <= (0 if is_strict else PARKED_BYTES),
        "registers": built.registers <= most,
        "128-bit loads": built.wide_loads >= twin.wide_loads,
        "depth": (built.wait_depth or 0) >= (twin.wait_depth or 0),
        "shared memory": built.shared_bytes <= MAX_SHARED_BYTES[built.arch],
    }
    return [f"{name}: {built} against {twin}" for name, met in gates.items() if not met]


def all_faults(arch: str, dtype: str, block_sizes: tuple[int, ...], head_dim: int) -> list[str]:
    """The gates that fail for these block sizes."""
    sizes = {"dtype": dtype, "head_dim": head_dim}
    twin = code("contiguous", arch, **sizes)
    return [
        fault
        for block_size in block_sizes
        for fault in faults(code("chunked", arch, block_size=block_size, **sizes), twin, **sizes)
    ]


QUICK = [
    ("sm_90", "bfloat16", BLOCK_SIZES, 128),
    *((arch, "bfloat16", (16,), 128) for arch in ARCHS if arch != "sm_90"),
    ("sm_90", "float16", (16,), 128),
    ("sm_90", "float32", (16,), 128),
    ("sm_90", "bfloat16", (16,), 64),
    ("sm_90", "bfloat16", (16,), 256),
]
WHOLE = list(itertools.product(ARCHS, ("float16", "bfloat16", "float32"), HEAD_DIMS))


@pytest.mark.parametrize(("arch", "dtype", "block_sizes", "head_dim"), QUICK)
def test_the_paged_kernel_loses_nothing_to_its_twin(
    arch: str, dtype: str, block_sizes: tuple[int, ...], head_dim: int
) -> None:
    assert not all_faults(arch, dtype, block_sizes, head_dim)


@pytest.mark.slow
@pytest.mark.parametrize(("arch", "dtype", "head_dim"), WHOLE)
def test_no_paged_kernel_loses_anything_to_its_twin(arch: str, dtype: str, head_dim: int) -> None:
    assert not all_faults(arch, dtype, BLOCK_SIZES, head_dim)


@pytest.mark.parametrize("query_heads", [8, pytest.param(256, marks=pytest.mark.slow), 512])
def test_other_gqa_ratios_and_a_window_keep_the_gates(query_heads: int) -> None:
    sizes = {"query_heads": query_heads, "window": 1024}
    twin = code("contiguous", "sm_90", **sizes)
    assert not faults(code("chunked", "sm_90", **sizes), twin)


@pytest.mark.parametrize("block_size", [16, 256])
def test_a_kernel_that_writes_its_result_at_once_keeps_the_gates(block_size: int) -> None:
    """Large batches are not split: the output then is bf16, and there is nothing to merge."""
    twin = code("contiguous", "sm_90", num_splits=1)
    assert not faults(code("chunked", "sm_90", num_splits=1, block_size=block_size), twin)


def test_all_loads_of_a_tile_are_128_bits() -> None:
    # What remains narrow: a length, and the ids of a chunk.
    built = code("chunked", "sm_90")
    assert built.narrow_loads <= 4
    assert code("contiguous", "sm_90").narrow_loads <= 2
    assert built.wide_loads >= 32


def test_the_gate_sees_the_naive_walk() -> None:
    twin = code("contiguous", "sm_90")
    naive = code("naive", "sm_90")
    assert twin.wait_depth == 2
    assert naive.wait_depth == 0
    assert any("depth" in fault for fault in faults(naive, twin))


def test_the_gate_sees_strides_that_are_not_known_to_be_aligned() -> None:
    launch = decode_launch("chunked", arch="sm_90")
    built = compiled.machine_code(launch, "sm_90", keep_divisibility=False)
    assert built.wide_loads == 0
    assert any("128-bit" in fault for fault in faults(built, code("contiguous", "sm_90")))


def test_the_gate_sees_spills() -> None:
    launch = decode_launch("chunked", arch="sm_90", head_dim=256, tile=256, num_warps=4)
    built = compiled.machine_code(launch, "sm_90")
    assert built.spills > 0
    assert built.spill_bytes > PARKED_BYTES
    assert built.registers == 255


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_more_stages_are_more_copies_in_flight(arch: str) -> None:
    deep = code("chunked", arch, num_stages=4)
    assert deep.wait_depth == code("contiguous", arch, num_stages=4).wait_depth == 4


def test_offsets_are_computed_in_64_bits() -> None:
    text = compiled.compile_for(decode_launch("chunked", arch="sm_90"), "sm_90").asm["ttir"]
    adding = [line for line in text.splitlines() if "tt.addptr" in line and "bf16" in line]
    assert len(adding) >= 4
    assert all("i64" in line for line in adding)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_the_other_kernels_load_128_bits_and_spill_nothing(arch: str) -> None:
    half, floats = torch.bfloat16, torch.float32
    cache = empty(512, 16, 8, 128, dtype=half)
    new, slots = empty(64, 8, 128, dtype=half), empty(64, dtype=torch.int64)
    parts = empty(8, 4, 32, 128, dtype=floats), empty(8, 4, 32, dtype=floats)
    launches = {
        "store": store.prepare(new, new, cache, cache, slots),
        "merge": merge.prepare(*parts).launches[0],
        "read": read.prepare(empty(2**20, dtype=half)),
    }
    for name, launch in launches.items():
        built = compiled.machine_code(launch, arch)
        assert built.spills == 0, name
        assert built.registers <= 64, (name, built)
        assert built.wide_loads >= 1, (name, built)
        assert built.narrow_loads <= 3, (name, built)  # slots, LSEs
    assert compiled.machine_code(launches["read"], arch).narrow_loads == 0


def test_without_a_gpu_a_launch_takes_nothing_known() -> None:
    taken = compiled.resources(decode_launch("chunked", arch="sm_90"))
    assert (taken.registers, taken.spills, taken.shared_bytes) == (None, None, None)
