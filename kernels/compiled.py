"""What the compiler made of a launch: registers, spills, 128-bit loads, depth of the pipeline.

`machine_code` compiles ahead of time, for a chip that need not be here, with the specialisation
that the launcher would infer from the same arguments; `resources` asks the chip that is here. A
launch on tensors of the meta device is enough for the first.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from .launch import Launch, is_interpreted

ARCHS = ("sm_80", "sm_90", "sm_100", "gfx942")
# What one program may have, in bytes (CUDA programming guide, compute capabilities; CDNA 3 ISA).
MAX_SHARED_BYTES = {
    "sm_80": 163 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "gfx942": 64 * 1024,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCode:
    """One kernel on one architecture, read from its compiled code.

    spills: loads and stores of spilled registers; loop_spills: those in the innermost loops;
    spill_bytes: their room for a thread;
    wide_loads: instructions that load 16 bytes a thread from global memory, counted where they
    stand; narrow_loads: those that load less; wait_depth: groups of asynchronous copies that may
    still be in flight when a tile is used (None on gfx942, which has none).
    """

    arch: str
    triton: str
    registers: int
    spills: int
    loop_spills: int
    spill_bytes: int
    shared_bytes: int
    wide_loads: int
    narrow_loads: int
    wait_depth: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What a kernel takes on the chip that runs it; None where triton does not say."""

    registers: int | None
    spills: int | None
    shared_bytes: int | None


def target_of(arch: str) -> GPUTarget:
    """triton's name for an architecture: sm_90, gfx942."""
    if arch.startswith("sm_"):
        return GPUTarget("cuda", int(arch[3:]), 32)
    return GPUTarget("hip", arch, 64)


def compile_for(launch: Launch, arch: str, *, keep_divisibility: bool = True) -> Any:
    """triton's compiled kernel of a launch on arch; without divisibility to show what it is worth.

    The binder and the packing are the launcher's own, so the attributes are the same.
    """
    kernel = launch.kernel
    if is_interpreted(kernel):
        raise ValueError("TRITON_INTERPRET was set when the kernels were imported")
    target = target_of(arch)
    backend = make_backend(target)
    options = {**launch.options, "debug": False}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = bind(**launch.arguments, **options)
    parsed, signature, constexprs, attributes = kernel._pack_args(
        backend, options, bound, specialization, rest
    )
    if not keep_divisibility:
        attributes = {}
    source = ASTSource(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=target, options=dict(parsed.__dict__))


def machine_code(launch: Launch, arch: str, *, keep_divisibility: bool = True) -> MachineCode:
    """Compile a launch for arch (one of ARCHS, or another that triton knows) and read the code."""
    built = compile_for(launch, arch, keep_divisibility=keep_divisibility)
    read = _read_nvidia if arch.startswith("sm_") else _read_amd
    return MachineCode(
        arch=arch,
        triton=triton.__version__,
        shared_bytes=built.metadata.shared,
        **read(built),
    )


def _read_nvidia(built: Any) -> dict[str, Any]:
    usage = _disassembled(built.asm["cubin"], "cuobjdump", "-res-usage")
    numbers = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage))
    code = _disassembled(built.asm["cubin"], "nvdisasm", "-c")
    # LDGSTS copies to shared memory behind the program's back, LDG loads into registers.
    loads = re.findall(r"\b(?:LDGSTS|LDG)\.[\w.]+", code)
    wide = sum(".128" in load for load in loads)
    spills = [found.start() for found in re.finditer(r"\b(?:STL|LDL)\b", code)]
    loops = _loops(code)
    waits = re.findall(r"cp\.async\.wait_group\s+(?:0x)?(\d+)", built.asm["ptx"])
    return {
        "registers": int(numbers["REG"]),
        "spills": len(spills),
        "loop_spills": sum(any(at in loop for loop in loops) for at in spills),
        "spill_bytes": int(numbers["STACK"]) + int(numbers["LOCAL"]),
        "wide_loads": wide,
        "narrow_loads": len(loads) - wide,
        "wait_depth": max(map(int, waits), default=0),
    }


def _read_amd(built: Any) -> dict[str, Any]:
    code = built.asm["amdgcn"]
    counts = {
        key: int(value)
        for key, value in re.findall(
            r"^\s+\.(vgpr_count|agpr_count|vgpr_spill_count|private_segment_fixed_size):\s+(\d+)",
            code,
            re.M,
        )
    }
    loads = re.findall(r"\b(?:global|buffer|flat)_load_(\w+)", code)
    wide = sum(load.endswith("x4") for load in loads)
    return {
        # vgpr_count already holds the accumulation registers: both come from one file of 512.
        "registers": counts["vgpr_count"],
        "spills": counts["vgpr_spill_count"],
        "loop_spills": counts["vgpr_spill_count"],  # wherever they are
        "spill_bytes": counts["private_segment_fixed_size"],
        "wide_loads": wide,
        "narrow_loads": len(loads) - wide,
        "wait_depth": None,
    }


def _loops(code: str) -> list[range]:
    """The innermost loops: from a label to a branch back to it, with no such branch between."""
    labels = {found[1]: found.start() for found in re.finditer(r"^(\.L_\w+):", code, re.M)}
    branches = re.finditer(r"\bBRA `\((\.L_\w+)\)", code)
    loops = [range(labels[found[1]], found.start()) for found in branches]
    loops = [loop for loop in loops if loop]
    return [loop for loop in loops if not any(a.start in loop for a in loops if a != loop)]


def _disassembled(cubin: bytes, tool: str, flag: str) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        done = subprocess.run(
            [_nvidia_tool(tool), flag, str(path)], capture_output=True, text=True, check=True
        )
    return done.stdout


@lru_cache
def _nvidia_tool(name: str) -> str:
    """One of the tools that triton's wheel brings along."""
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    if not path.exists():
        raise ValueError(f"this triton ({triton.__version__}) comes without {name}")
    return str(path)


def resources(launch: Launch) -> Resources:
    """What a launch takes on its own device, compiled if need be and not started.

    Everything is None in the interpreter, and what a release of triton does not tell is None.
    """
    if is_interpreted(launch.kernel) or launch.device.type != "cuda":
        return Resources(registers=None, spills=None, shared_bytes=None)
    with launch.on_device():
        handle = launch.kernel.warmup(**launch.arguments, **launch.options, grid=launch.grid)
        load = getattr(handle, "_init_handles", None)
        if load is not None:  # registers are known once the code is on the device
            load()
    return Resources(
        registers=getattr(handle, "n_regs", None),
        spills=getattr(handle, "n_spills", None),
        shared_bytes=getattr(handle.metadata, "shared", None),
    )
