"""What a step must read and compute, by hand."""

from __future__ import annotations

import pytest
from decode_cases import LLAMA, MISTRAL, TOKEN_BYTES, case_of, tiny

from kvtool.bench.decode import arithmetic as decode_bytes


def test_arithmetic_by_hand() -> None:
    """Matrices of a layer: Q 128·256, K and V 128·128, O 256·128, three of 128·128."""
    plan, windowed = tiny(LLAMA), tiny(MISTRAL)
    linear = 2 * (128 * 256 * 2 + 128 * 128 * 2 + 3 * 128 * 128)
    head = 128 * 128
    norms = 5 * 128
    assert plan.linear_parameters == linear
    assert plan.num_parameters == linear + 2 * head + norms
    assert plan.read_parameters == linear + head + norms
    attention = 4 * 4 * 64 * 2  # per query and key, both layers
    assert decode_bytes.decode_flops(plan, 3, 30) == 3 * (2 * (linear + head) + 30 * attention)
    pairs = 30 * 31 // 2
    expected = 2 * (2 * linear * 30 + 2 * head + pairs * attention)
    assert decode_bytes.prefill_flops(plan, 2, 30) == expected
    pairs = 24 * 25 // 2 + 6 * 24
    expected = 2 * linear * 30 + 2 * head + pairs * attention
    assert decode_bytes.prefill_flops(windowed, 1, 30) == expected


def test_the_bytes_bound_the_gain() -> None:
    plan = tiny(LLAMA)
    weights, cache = plan.read_parameters * 4, 3 * 27 * TOKEN_BYTES  # 21 + 12 // 2 tokens
    gain = decode_bytes.predicted_gain(plan, case_of("paged"), "dynamic", 4)
    assert gain == pytest.approx((weights + 3 * cache) / (weights + cache))
    gain = decode_bytes.predicted_gain(plan, case_of("static", max_tokens=400), "dynamic", 4)
    wide = 3 * 400 * TOKEN_BYTES
    assert gain == pytest.approx((weights + 3 * cache) / (weights + wide))
    gain = decode_bytes.predicted_gain(plan, case_of("static", max_tokens=400), "contiguous", 4)
    assert gain == pytest.approx((weights + cache) / (weights + wide))
    assert decode_bytes.predicted_gain(plan, case_of("paged"), "contiguous", 4) == 1
    assert decode_bytes.predicted_gain(plan, case_of("none"), "dynamic", 4) is None
    # Weights that dwarf the cache leave nothing to gain but what batching gives.
    assert decode_bytes.batch_gain(10**12, 1.0, 8, 2) == pytest.approx(4)
    assert decode_bytes.batch_gain(0, 1.0, 8, 2) == pytest.approx(1)
