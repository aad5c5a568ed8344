"""presets/gpus: complete, unambiguous, sourced, and physically plausible."""

from __future__ import annotations

import re
from collections import Counter
from datetime import date

import pytest

from kvtool.catalog import GpuPreset, gpu_preset, gpu_presets
from kvtool.errors import USAGE, KvtoolError
from kvtool.units import GIB

GPUS = gpu_presets()
each_gpu = pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.id)

# GDDR cards whose driver has ECC on give a sixteenth of the memory to it.
ECC_ON = {"a40", "a10", "a10g", "l40s", "l20", "l4", "t4", "p40"}
# The system takes its share of these, so the driver's total says little about the nominal one.
UNIFIED = {gpu.id for gpu in GPUS if "unified" in gpu.nominal_memory}

FORMATS = {
    "fp32", "fp16", "bf16", "int8", "fp6", "fp4",
    "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz",
}  # fmt: skip


def test_there_are_enough_of_them():
    assert len(GPUS) >= 40
    assert {"NVIDIA", "AMD", "Intel", "Google", "AWS", "Apple"} == {gpu.vendor for gpu in GPUS}


def test_no_two_gpus_share_a_name():
    names = Counter(name for gpu in GPUS for name in (gpu.id, *gpu.aliases))
    assert [name for name, times in names.items() if times > 1] == []
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in names)


@each_gpu
def test_every_name_finds_its_gpu_in_any_case(gpu: GpuPreset):
    for name in (gpu.id, *gpu.aliases):
        assert gpu_preset(name) == gpu
        assert gpu_preset(name.upper().replace("-", " ")) == gpu


@pytest.mark.parametrize(
    ("alias", "gpu_id"),
    [
        ("h100", "h100-sxm"),
        ("a100", "a100-80gb"),
        ("v100", "v100-32gb"),
        ("4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("RTX 4090", "rtx-4090"),
        ("3090", "rtx-3090"),
        ("5090", "rtx-5090"),
        ("m4-max", "m4-max-128gb"),
    ],
)
def test_the_names_people_type(alias: str, gpu_id: str):
    assert gpu_preset(alias).id == gpu_id


@pytest.mark.parametrize(
    "name",
    ["h200", "b200", "l4", "l40s", "t4", "mi300x", "a10g", "a100-40gb", "h20", "gaudi3", "tpu-v5e"],
)
def test_the_ids_people_type(name: str):
    assert gpu_preset(name).id == name


@pytest.mark.parametrize(
    ("name", "near"), [("h10", "h100"), ("rtx-4900", "rtx-4090"), ("mi300", "mi300x")]
)
def test_an_unknown_gpu_gets_a_suggestion(name: str, near: str):
    with pytest.raises(KvtoolError, match=f"no GPU is called '{name}'") as caught:
        gpu_preset(name)
    assert caught.value.exit_code == USAGE
    assert "Did you mean" in caught.value.hint
    assert near in caught.value.hint
    assert "kvtool presets gpus" in caught.value.hint


@each_gpu
def test_usable_memory_is_the_nominal_read_as_gib(gpu: GpuPreset):
    """Vendors write GB for what the driver counts in GiB: 80 GB is 79.65 GiB, not 74.5."""
    assert str(int(gpu.nominal_gb)) in gpu.nominal_memory
    if gpu.usable_bytes is None:
        return
    nominal = gpu.nominal_gb * GIB
    if gpu.id in UNIFIED:
        assert 0.6 * nominal < gpu.usable_bytes < nominal
    else:
        expected = nominal * 15 / 16 if gpu.id in ECC_ON else nominal
        assert gpu.usable_bytes == pytest.approx(expected, rel=0.03)
        assert gpu.usable_bytes <= nominal


def test_most_gpus_have_a_measured_total():
    assert sum(gpu.usable_bytes is not None for gpu in GPUS) >= 38


@each_gpu
def test_rates_are_positive_and_plausible(gpu: GpuPreset):
    assert 100 < gpu.bandwidth_gb_s < 10_000
    rates = (
        gpu.dense_bf16_tflops,
        gpu.dense_fp16_tflops,
        gpu.dense_fp8_tflops,
        gpu.dense_int8_tops,
        gpu.l2_mb,
        gpu.num_sms,
    )
    assert all(rate is None or rate > 0 for rate in rates)
    if gpu.dense_fp8_tflops is not None and gpu.dense_bf16_tflops is not None:
        # Gaudi 3 runs both at one rate, every other device fp8 at twice the rate; a ratio of four
        # would be a sparse figure among dense ones.
        assert 1 <= gpu.dense_fp8_tflops / gpu.dense_bf16_tflops < 2.1


@each_gpu
def test_a_price_has_a_source_and_a_date_or_is_absent(gpu: GpuPreset):
    if gpu.price_usd_per_hour is None:
        assert gpu.price_source is None
        assert gpu.price_date is None
    else:
        assert 0 < gpu.price_usd_per_hour < 20
        assert gpu.price_source
        assert date.fromisoformat(gpu.price_date or "") > date(2025, 1, 1)


@each_gpu
def test_sources_are_public_references(gpu: GpuPreset):
    assert gpu.source.strip()
    for text in (gpu.source, gpu.note, gpu.price_source or ""):
        # owner/repo#123 is a thread; a longer number is an index that no reader can follow.
        assert not re.search(r"#\d{7,}", text)
        assert "  " not in text


@each_gpu
def test_kv_formats_follow_from_the_architecture(gpu: GpuPreset):
    native, storage = set(gpu.native_kv_dtypes), set(gpu.storage_kv_dtypes)
    assert native
    assert native | storage <= FORMATS
    assert not native & storage
    if gpu.vendor == "NVIDIA":
        capability = float(gpu.compute_capability or 0)
        assert ("fp8_e4m3" in native) == (capability >= 8.9)
        assert ("fp8_e4m3" in storage) == (capability < 8.9)
        assert ("bf16" in native) == (capability >= 8.0)
        assert ("fp4" in native) == (capability >= 10.0)
    if gpu.arch == "CDNA3":
        assert {"fp8_e4m3fnuz", "fp8_e5m2fnuz"} <= native
        assert not {"fp8_e4m3", "fp8_e5m2"} & (native | storage)


def test_variants_that_differ_are_not_one_preset():
    sxm, pcie, nvl = (gpu_preset(name) for name in ("h100-sxm", "h100-pcie", "h100-nvl"))
    assert len({sxm.bandwidth_gb_s, pcie.bandwidth_gb_s, nvl.bandwidth_gb_s}) == 3
    module, device = gpu_preset("mi250x"), gpu_preset("mi250x-gcd")
    assert module.usable_bytes == 2 * (device.usable_bytes or 0)
