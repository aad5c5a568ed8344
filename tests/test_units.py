from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtool.errors import USAGE, KvtoolError, did_you_mean
from kvtool.units import (
    GIB,
    KIB,
    MAX_LIST,
    MIB,
    TIB,
    format_bytes,
    parse_bytes,
    parse_count,
    parse_counts,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("8k", 8192), ("8K", 8192), ("128k", 131072), ("1m", 2**20), (" 7 ", 7)],
)
def test_counts_have_binary_suffixes(text: str, value: int) -> None:
    assert parse_count(text, name="-c") == value


@pytest.mark.parametrize("text", ["", "k", "1.5k", "8kb", "1e3", "0x10", "1_000", "٣", "1 k", "-"])
def test_what_is_no_whole_number_is_a_usage_error(text: str) -> None:
    with pytest.raises(KvtoolError, match="not a whole number") as caught:
        parse_count(text, name="--batch")
    assert caught.value.exit_code == USAGE
    assert "--batch 8k" in caught.value.hint


@pytest.mark.parametrize("text", ["0", "-1", "9", "1m"])
def test_counts_out_of_range_name_the_range(text: str) -> None:
    with pytest.raises(KvtoolError, match="out of range") as caught:
        parse_count(text, name="--tp", low=1, high=8)
    assert caught.value.hint == "--tp takes 1 to 8"


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("4k,8k", [4096, 8192]),
        ("64,1", [64, 1]),
        ("1..64*2", [1, 2, 4, 8, 16, 32, 64]),
        ("1..100*10", [1, 10, 100]),
        ("3..20*2", [3, 6, 12]),
        ("1..4", [1, 2, 3, 4]),
        ("1k..4k+1k", [1024, 2048, 3072, 4096]),
        ("5..5", [5]),
        ("7,1..4*2,9", [7, 1, 2, 4, 9]),
    ],
)
def test_lists_and_ranges_keep_their_order(text: str, values: list[int]) -> None:
    assert parse_counts(text, name="-b") == values


def test_a_range_may_start_at_a_low_of_zero() -> None:
    assert parse_counts("0..100+25", name="--x", low=0) == [0, 25, 50, 75, 100]


def test_a_step_is_not_bound_by_the_values_of_the_option() -> None:
    assert parse_counts("16..32+8", name="--block-size", low=16) == [16, 24, 32]
    assert parse_counts("1..4*16", name="--tp", high=8) == [1]


@pytest.mark.parametrize("text", ["1..", "..4", "1...4", "1..4/2", "1..4*", "1..2..3", "1..8*2*2"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(KvtoolError, match=r"not a range|not a whole number"):
        parse_counts(text, name="-c")


@pytest.mark.parametrize("text", ["4..1", "1..8*1", "1..8*0", "1..8+0", "0..8*2"])
def test_a_range_that_does_not_move_up_is_refused(text: str) -> None:
    with pytest.raises(KvtoolError, match="does not move"):
        parse_counts(text, name="-c", low=0)


@pytest.mark.parametrize("text", ["1..1001", "1..1000,5", "4k..1m"])
def test_too_long_a_list_is_refused(text: str) -> None:
    with pytest.raises(KvtoolError, match=f"more than {MAX_LIST} values"):
        parse_counts(text, name="-c")


def test_the_longest_list_is_allowed() -> None:
    assert len(parse_counts("1..1000", name="-c")) == MAX_LIST


@pytest.mark.parametrize("text", ["", ",", "1,", "1,,2"])
def test_an_empty_place_in_a_list_is_refused(text: str) -> None:
    with pytest.raises(KvtoolError, match="not a whole number"):
        parse_counts(text, name="-c")


@given(st.lists(st.integers(1, 2**40), min_size=1, max_size=50))
def test_a_written_list_reads_back(values: list[int]) -> None:
    assert parse_counts(",".join(map(str, values)), name="-c") == values


@given(st.integers(1, 10**6), st.integers(0, 10**6), st.integers(1, 10**5))
def test_an_added_range_is_pythons_range(start: int, span: int, step: int) -> None:
    expected = list(range(start, start + span + 1, step))
    text = f"{start}..{start + span}+{step}"
    if len(expected) > MAX_LIST:
        with pytest.raises(KvtoolError):
            parse_counts(text, name="-c")
    else:
        assert parse_counts(text, name="-c") == expected


@given(st.text(alphabet="0123456789kKmM.,*+- x", max_size=20))
def test_any_text_is_read_or_refused_in_words(text: str) -> None:
    try:
        values = parse_counts(text, name="-c", low=2, high=10**6)
    except KvtoolError:
        return
    assert all(2 <= value <= 10**6 for value in values)
    assert 0 < len(values) <= MAX_LIST


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("123B", 123),
        ("20GiB", 20 * GIB),
        ("80GB", 80 * 10**9),
        ("80 gb", 80 * 10**9),
        ("1.5KiB", 1536),
        ("2.3GB", 2_300_000_000),  # 2.3 * 1e9 in floats is a byte short
        ("0.1TB", 10**11),
        ("1TiB", TIB),
        ("0.3KiB", 307),  # part of a byte is no byte
    ],
)
def test_memory_with_its_unit(text: str, count: int) -> None:
    assert parse_bytes(text, name="--kv-memory") == count


@pytest.mark.parametrize(
    "text", ["", "20", "GiB", "20G", "-1GB", "1.GB", ".5GB", "1e3GB", "20GiBs"]
)
def test_memory_without_number_or_unit_is_refused(text: str) -> None:
    with pytest.raises(KvtoolError, match="not an amount of memory") as caught:
        parse_bytes(text, name="--kv-memory")
    assert caught.value.exit_code == USAGE


@given(st.integers(0, 10**9), st.integers(0, 999), st.sampled_from(["KB", "MB", "GB", "TB"]))
def test_decimal_memory_is_exact_to_the_byte(whole: int, thousandths: int, unit: str) -> None:
    scale = {"KB": 1, "MB": 10**3, "GB": 10**6, "TB": 10**9}[unit]
    expected = (whole * 1000 + thousandths) * scale
    assert parse_bytes(f"{whole}.{thousandths:03}{unit}", name="--x") == expected


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1,023 B"),
        (1024, "1.00 KiB"),
        (320 * KIB, "320.00 KiB"),
        (1019 * KIB, "1,019.00 KiB"),
        (MIB - 1, "1.00 MiB"),  # not 1,024.00 KiB
        (GIB - 1, "1.00 GiB"),
        (TIB - 1, "1.00 TiB"),
        (5 * GIB // 2, "2.50 GiB"),
        (3000 * TIB, "3,000.00 TiB"),
        (-5 * MIB, "-5.00 MiB"),
    ],
)
def test_bytes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text


@given(st.integers(0, 2**60))
def test_formatted_bytes_read_back_within_their_two_decimals(count: int) -> None:
    text = format_bytes(count)
    number, unit = text.split()
    size = {"B": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}[unit]
    again = parse_bytes(text.replace(",", ""), name="--x")
    assert abs(again - count) <= size // 200 + 1
    assert unit == "TiB" or float(number.replace(",", "")) < 1024


def test_near_names_are_found_whatever_their_case() -> None:
    assert did_you_mean("h1000", ["H100", "A100"]) == " Did you mean H100 or A100?"
    assert did_you_mean("qwen/qwen3-8b", ["Qwen/Qwen3-8B"]) == " Did you mean Qwen/Qwen3-8B?"
    assert did_you_mean("zzz", ["H100"]) == ""
