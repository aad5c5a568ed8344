"""How many bytes a cached vector takes in each KV dtype, scales and zero points included."""

from __future__ import annotations

from dataclasses import dataclass

from kvtool.errors import did_you_mean, usage_error


@dataclass(frozen=True, slots=True, kw_only=True)
class Dtype:
    """A storage format. `block` elements share `scale_bytes`; block 0 is one token's whole head."""

    name: str
    bits: int
    block: int = 0
    scale_bytes: int = 0
    about: str = ""

    def vector_bytes(self, elements: int) -> int:
        """Bytes of one head's vector of one token; a last block that is not full is a whole one."""
        if elements == 0:
            return 0
        block = self.block or elements
        blocks = -(-elements // block)
        if not self.block:
            return -(-elements * self.bits // 8) + self.scale_bytes
        return blocks * (block * self.bits // 8 + self.scale_bytes)

    def scale_share(self, elements: int) -> int:
        """Of those bytes, scales and zero points."""
        blocks = -(-elements // self.block) if self.block else min(elements, 1)
        return blocks * self.scale_bytes


_HEAD = "one fp16 scale and one fp16 zero point for each token and head (LMDeploy, kv_quant.md)"
_GGML = "ggml block, ggml-common.h"

DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype(name="fp32", bits=32),
        Dtype(name="fp16", bits=16),
        Dtype(name="bf16", bits=16),
        Dtype(name="fp8", bits=8, about="e4m3; one scale a tensor, not counted"),
        Dtype(name="fp8_e5m2", bits=8, about="e5m2, no scale"),
        Dtype(name="int8", bits=8, scale_bytes=4, about=_HEAD),
        Dtype(name="int4", bits=4, scale_bytes=4, about=_HEAD),
        Dtype(name="int2", bits=2, scale_bytes=4, about=_HEAD),
        Dtype(name="nvfp4", bits=4, block=16, scale_bytes=1, about="e2m1, an fp8 scale for 16"),
        Dtype(name="q8_0", bits=8, block=32, scale_bytes=2, about=f"{_GGML}: 34 bytes for 32"),
        Dtype(name="q5_1", bits=5, block=32, scale_bytes=4, about=f"{_GGML}: 24 bytes for 32"),
        Dtype(name="q5_0", bits=5, block=32, scale_bytes=2, about=f"{_GGML}: 22 bytes for 32"),
        Dtype(name="q4_1", bits=4, block=32, scale_bytes=4, about=f"{_GGML}: 20 bytes for 32"),
        Dtype(name="q4_0", bits=4, block=32, scale_bytes=2, about=f"{_GGML}: 18 bytes for 32"),
        Dtype(name="iq4_nl", bits=4, block=32, scale_bytes=2, about=f"{_GGML}: 18 bytes for 32"),
    )
}
MODEL_DTYPES = ("fp32", "fp16", "bf16")
ALIASES = {
    "float32": "fp32", "float": "fp32", "f32": "fp32",
    "float16": "fp16", "half": "fp16", "f16": "fp16",
    "bfloat16": "bf16",
    "fp8_e4m3": "fp8", "fp8_e4m3fn": "fp8", "float8_e4m3fn": "fp8", "e4m3": "fp8",
    "float8_e5m2": "fp8_e5m2", "e5m2": "fp8_e5m2",
}  # fmt: skip


def dtype_named(name: str, *, flag: str, among: tuple[str, ...] | None = None) -> Dtype:
    """The dtype of that name or alias, or a usage error with the near ones."""
    known = among or tuple(DTYPES)
    plain = name.strip().lower()
    plain = ALIASES.get(plain, plain)
    if plain not in known:
        raise usage_error(
            f"{flag}: unknown dtype '{name[:40]}'",
            f"the dtypes are {', '.join(known)}.{did_you_mean(plain, known)}",
        )
    return DTYPES[plain]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvDtype:
    """The dtypes of K and of V; the same for both unless typed as 'int4/int2'."""

    k: Dtype
    v: Dtype

    @property
    def name(self) -> str:
        """'bf16', or 'int4/int2' where they differ."""
        return self.k.name if self.k == self.v else f"{self.k.name}/{self.v.name}"


def parse_kv_dtype(text: str, *, auto: Dtype) -> KvDtype:
    """'fp8', 'int4/int2' or 'auto', which is `auto`."""
    parts = text.split("/")
    if not 1 <= len(parts) <= 2:
        raise usage_error(
            f"--kv-dtype: '{text[:40]}' is not K/V", "write one dtype, or K/V apart: int4/int2"
        )
    dtypes = [
        auto if part.strip().lower() == "auto" else dtype_named(part, flag="--kv-dtype")
        for part in parts
    ]
    return KvDtype(k=dtypes[0], v=dtypes[-1])
