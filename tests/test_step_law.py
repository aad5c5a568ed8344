"""The law of a step's time that follows from a model and a GPU, by hand."""

from __future__ import annotations

import pytest

from kvtool.config import load_config
from kvtool.errors import KvtoolError
from kvtool.prefill import prefill_of
from kvtool.step_law import law_of


def test_the_roofline_of_llama_3_8b_on_an_h100_by_hand() -> None:
    # 16,060,522,496 B of weights without the 128,256 × 4,096 of the embedding table in bf16, and 131,072 B
    # a token, at 0.8 of 3.35 TB/s; 2 FLOPs a token for each of 6,979,321,856 parameters, for a pair 2 × 256
    # for each of 32 heads in 32 layers, and for a request's logits the head, at half of 989 TFLOP/s.
    law = law_of(prefill_of(load_config, "llama-3-8b", gpu="h100"))
    step = law.step_time
    assert step.base_ns == 1_000_000
    assert step.read_ns == round((16_060_522_496 - 128_256 * 4096 * 2) / (3350 * 0.8))
    assert step.context_ns == pytest.approx(131_072 / (3350 * 0.8), abs=1e-6)
    assert step.token_ns == pytest.approx(2 * 6_979_321_856 / (989e3 * 0.5), abs=1e-6)
    assert step.request_ns == pytest.approx(2 * 525_336_576 / (989e3 * 0.5), abs=1e-6)
    assert step.attention_ns == pytest.approx(2 * 256 * 32 * 32 / (989e3 * 0.5), abs=1e-6)
    assert "an estimate" in law.source


def test_without_a_gpu_there_is_no_time() -> None:
    with pytest.raises(KvtoolError, match="no time without a GPU"):
        law_of(prefill_of(load_config, "llama-3-8b"))
