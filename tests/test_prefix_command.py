"""`kvtool prefix` from the command line: its rows, its reasons, its words, its refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtool.run import Run
from kvtool.view.prefix import view

CONTRACT = {
    "index", "policy", "block_size", "trace_block_size", "capacity_blocks", "capacity_tokens",
    "cache_outputs", "requests", "queried_tokens", "hit_tokens", "hit_rate", "evicted_blocks",
    "evicted_leaves", "rejected",
}  # fmt: skip
TIMINGS = {"index_s_per_request", "naming_s_per_request"}
SHARES = ("hit_tokens", "lost_tokens", "rounded_tokens", "last_block_tokens", "new_tokens")


@pytest.fixture
def rows(kvtool: Callable[..., Any]) -> Callable[..., list[dict[str, Any]]]:
    """The rows of `kvtool prefix …`."""

    def run(*argv: str, code: int = 0) -> list[dict[str, Any]]:
        ran = kvtool("prefix", *argv, "--json")
        assert ran.code == code, ran.err
        found: list[dict[str, Any]] = ran.json["rows"]
        return found

    return run


def line(tokens: int, blocks: list[int], output: int = 9, **more: Any) -> dict[str, Any]:
    """A request as Mooncake's traces have it."""
    return {"timestamp": 0, "input_length": tokens, "output_length": output,
            "hash_ids": blocks, **more}  # fmt: skip


@pytest.fixture
def trace(tmp_path: Path) -> Callable[..., str]:
    """A file of requests."""

    def write(*lines: dict[str, Any]) -> str:
        place = tmp_path / "trace.jsonl"
        place.write_text("".join(json.dumps(one) + "\n" for one in lines))
        return str(place)

    return write


def chats(count: int, turns: int = 4) -> list[dict[str, Any]]:
    """Conversations that begin alike and grow by a block a turn, all live at once."""
    return [
        line(512 * (turn + 2) + 100, [0, *range(100 * chat, 100 * chat + turn + 2)],
             tenant=f"team-{chat % 2}")
        for turn in range(turns)
        for chat in range(1, count + 1)
    ]  # fmt: skip


def test_a_row_has_the_contract_and_its_reasons_add_up(rows: Any, trace: Any) -> None:
    found = rows("--trace", trace(*chats(20)), "--capacity", "5,40,1k", "--policy", "lru,lfu")
    assert [(row["index"], row["policy"], row["capacity_blocks"]) for row in found] == [
        (index, policy, blocks)
        for index in ("hash", "radix") for policy in ("lru", "lfu") for blocks in (5, 40, 1024)
    ]  # fmt: skip
    for row in found:
        assert row.keys() >= CONTRACT
        assert (
            sum(row[name] for name in SHARES)
            == row["queried_tokens"]
            == 20 * (1124 + 1636 + 2148 + 2660)
        )
        assert min(row[name] for name in SHARES) >= 0
        assert row["capacity_tokens"] == row["capacity_blocks"] * row["block_size"]
        assert row["hit_rate"] == row["hit_tokens"] / row["queried_tokens"]
        assert (row["block_size"], row["cache_outputs"]) == (512, "none")
    large = [row for row in found if row["capacity_blocks"] == 1024]
    # All but the first request find the first block; later turns the whole prompt before.
    assert {row["hit_tokens"] for row in large} == {512 * (19 + 20 * (2 + 3 + 4))}
    assert {row["lost_tokens"] for row in large} == {0}


def test_all_capacities_are_those_of_replays(rows: Any, trace: Any) -> None:
    place = trace(*chats(20))
    curve = rows("--trace", place, "--index", "hash", "--points", "9")
    sizes = [row["capacity_blocks"] for row in curve]
    assert sizes == sorted(set(sizes))
    assert curve[0]["rejected"] > 0  # not every request fits
    assert curve[-1]["lost_tokens"] == 0
    assert any(row["index_bytes"] is None for row in curve)
    single = rows("--trace", place, "--index", "hash", "--capacity", ",".join(map(str, sizes)))
    names = sorted(CONTRACT | set(SHARES))
    assert [[row[name] for name in names] for row in curve] == [
        [row[name] for name in names] for row in single
    ]


def test_the_same_seed_gives_the_same_rows(rows: Any) -> None:
    def untimed(*words: str) -> list[dict[str, Any]]:
        found = rows(
            "--workload", "chat,unique", "--num-requests", "200", "--capacity", "500", *words
        )
        return [{k: v for k, v in row.items() if k not in TIMINGS} for row in found]

    assert untimed() == untimed()
    assert untimed("--seed", "1") != untimed()


def test_made_prompts_have_each_index_s_own_blocks(rows: Any) -> None:
    found = rows("--workload", "few-shot", "--num-requests", "100", "--capacity", "100000")
    assert [(row["index"], row["block_size"], row["capacity_blocks"]) for row in found] == [
        ("hash", 16, 100_000), ("radix", 1, 1_600_000),
    ]  # fmt: skip
    one, two = found
    assert one["cache_outputs"] == "known"
    assert one["rounded_tokens"] + one["last_block_tokens"] > 0 == two["rounded_tokens"]
    assert two["hit_tokens"] > one["hit_tokens"]
    assert one["made"]["num_prefixes"] == 57
    explicit = rows("--workload", "few-shot", "--num-requests", "100", "--capacity", "10",
                    "--block-size", "16,32")  # fmt: skip
    assert [(row["block_size"], row["capacity_blocks"]) for row in explicit] == [
        (16, 10),
        (32, 10),
    ] * 2


def test_outputs_that_are_known_are_found_by_the_next_turn(rows: Any) -> None:
    words = (
        "--workload",
        "chat",
        "--num-requests",
        "300",
        "--capacity",
        "100000",
        "--index",
        "hash",
    )
    hits = [row["hit_tokens"] for row in rows(*words, "--cache-outputs", "none,unique,known")]
    assert hits[0] == hits[1] < hits[2]


@pytest.mark.parametrize(
    ("prompts", "words", "reason"),
    [
        ([line(600, [1, 2]), line(600, [3, 4])], [], "no two prompts begin with the same token"),
        ([line(240, [1]), line(240, [1])], [], "the longest prefix that two prompts share has 240 tokens"),
        ([line(512, [1]), line(512, [1])], [], "the block of a prompt's last token is always computed"),
        ([line(600, [1, 2]), line(600, [3, 4]), line(600, [1, 2])], ["--capacity", "2"], "capacity. A cache"),
        ([line(2000, [1, 2, 3, 4])] * 2, ["--capacity", "2"], "every request is larger than the cache"),
        ([line(2000, [1, 2, 3, 4])], [], "a cold start"),
    ],
)  # fmt: skip
def test_a_rate_of_0_has_its_reason(
    kvtool: Any, trace: Any, prompts: Any, words: list[str], reason: str
) -> None:
    ran = kvtool(
        "prefix", "--trace", trace(*prompts), "--index", "hash", *(words or ["--capacity", "9"])
    )
    assert ran.code == 0
    assert reason in " ".join(ran.out.split())


def test_tenants_by_a_column(rows: Any, kvtool: Any, trace: Any) -> None:
    place = trace(*chats(20))
    (row,) = rows("--trace", place, "--tenants", "tenant", "--capacity", "30", "--index", "hash")
    one, two = row["tenants"]
    assert [one["tenant"], two["tenant"]] == ["team-1", "team-0"]
    for name in ("requests", "queried_tokens", "hit_tokens", "rejected"):
        assert one[name] + two[name] == row[name]
    taken = [
        tenant["evicted_blocks_of"][other]
        for tenant in row["tenants"]
        for other in ("team-1", "team-0")
    ]
    assert sum(taken) == row["evicted_blocks"] > min(taken) > 0
    assert kvtool("prefix", "--trace", place, "--tenants", "team").err.startswith(
        "Error: trace.jsonl has no column 'team'"
    )


def test_a_mix_is_of_tenants(rows: Any) -> None:
    (row,) = rows("--workload", "chat:3+agent:1", "--num-requests", "400", "--capacity", "4k",
                  "--index", "radix")  # fmt: skip
    assert [one["tenant"] for one in row["tenants"]] == ["multi-turn-chat", "agent"]
    assert row["tenants"][0]["requests"] > 2 * row["tenants"][1]["requests"] > 0


def test_memory_and_what_a_hit_is_worth(rows: Any) -> None:
    words = ("--workload", "system-prompts", "--num-requests", "300", "--model", "llama-3-8b")
    small, large = rows(*words, "--capacity", "1GiB,4GiB", "--index", "hash", "--gpu", "h100")
    assert small["bytes_per_token"] == 131_072
    assert small["capacity_blocks"] == 2**30 // 131_072 // 16
    assert large["capacity_bytes"] == 4 * 2**30
    assert 0 < small["saved_flops_share"] < large["saved_flops_share"] < large["hit_rate"] + 0.01
    assert large["cached_prefill_s_mean"] < large["uncached_prefill_s_mean"]
    assert large["efficiency"] == 0.5
    (fp8,) = rows(*words, "--capacity", "1GiB", "--index", "hash", "--kv-dtype", "fp8")
    assert fp8["capacity_blocks"] == 2 * small["capacity_blocks"]
    assert fp8["cached_prefill_s_mean"] is None
    (left,) = rows(*words, "--capacity", "gpu", "--gpu", "h100", "--index", "hash")
    assert 50 * 2**30 < left["capacity_bytes"] < 80 * 2**30


def test_a_model_whose_prefill_is_not_counted_has_its_memory(rows: Any, kvtool: Any) -> None:
    words = (
        "--workload",
        "unique",
        "--num-requests",
        "50",
        "--model",
        "orion-14b",
        "--index",
        "hash",
    )
    (row,) = rows(*words, "--capacity", "1GiB")
    assert row["bytes_per_token"] == 40 * 2 * 5120 * 2
    assert row["saved_flops"] is None
    assert "no FLOPs, no time: orion" in kvtool("prefix", *words, "--capacity", "1GiB").err


def test_tiers(rows: Any, kvtool: Any) -> None:
    words = ("--workload", "agent", "--num-requests", "400", "--model", "llama-3-8b", "--gpu", "h100",
             "--index", "hash", "--capacity", "4GiB", "--tiers")  # fmt: skip
    (row,) = rows(*words, "cpu=16GiB@25GB/s,disk=1TiB@100MB/s")
    gpu, cpu, disk = row["tiers"]
    assert gpu["hit_tokens"] == row["hit_tokens"]
    assert cpu["read_bytes"] == cpu["hit_tokens"] * 131_072 > 0
    assert cpu["written_bytes"] == row["evicted_blocks"] * 16 * 131_072
    assert cpu["load_s"] == cpu["read_bytes"] / 25e9
    assert cpu["saved_s"] > 0 > disk["saved_s"]
    everything = rows("--workload", "agent", "--num-requests", "400", "--index", "hash",
                      "--capacity", "1000000")  # fmt: skip
    assert sum(tier["hit_tokens"] for tier in row["tiers"]) == everything[0]["hit_tokens"]
    said = " ".join(kvtool("prefix", *words, "cpu=16GiB@25GB/s,disk=1TiB@100MB/s").out.split())
    total = sum(tier["hit_rate"] for tier in row["tiers"])
    assert f"at 4.00 GiB with its tiers {total:.2%} are hits, and the mean prefill takes" in said
    assert "cpu pays: loading its hits takes" in said
    assert "disk does not pay" in said


def test_a_tier_saves_no_more_than_there_is_above_reading_the_weights(rows: Any) -> None:
    (row,) = rows("--workload", "tree-of-thought", "--num-requests", "300", "--model", "llama-3-8b",
                  "--gpu", "h100", "--index", "hash", "--capacity", "1GiB",
                  "--tiers", "cpu=64GiB@1TB/s")  # fmt: skip
    gpu, cpu = row["tiers"]
    floor = 16_060_522_496 / 3350e9  # the weights once, at the GPU's bandwidth
    assert gpu["prefill_s_mean"] == pytest.approx(row["cached_prefill_s_mean"])
    assert cpu["prefill_s_mean"] >= floor
    assert cpu["saved_s"] == pytest.approx(300 * (gpu["prefill_s_mean"] - cpu["prefill_s_mean"]))
    assert 0 < cpu["recompute_s"] < 300 * (gpu["prefill_s_mean"] - floor)


def test_writes_that_take_longer_than_what_is_saved_are_said(kvtool: Any) -> None:
    ran = kvtool("prefix", "--workload", "system-prompts", "--num-requests", "400", "--model", "llama-3-8b",
                 "--gpu", "h100", "--index", "hash", "--capacity", "1GiB", "--tiers",
                 "cpu=64GiB@6GB/s")  # fmt: skip
    assert "cpu pays only if its writes, " in ran.out


def test_one_request_is_explained(kvtool: Any, trace: Any) -> None:
    place = trace(
        line(1100, [1, 2, 3]), line(1100, [4, 5, 6]), line(1100, [7, 8, 9]), line(1100, [1, 2, 10]),
        line(1100, [7, 8, 11]),
    )  # fmt: skip

    def said(number: int) -> str:
        ran = kvtool("prefix", "--trace", place, "--index", "hash", "--capacity", "5",
                     "--explain-request", str(number))  # fmt: skip
        assert ran.code == 0, ran.err
        return " ".join(ran.out.split())

    found = "at 2,560 tokens request 4 found 0 of its 1,100 tokens; earlier prompts had its first 1,024."
    assert found in said(4)
    assert "Request 1 was the last to have it, 3 requests before." in said(4)
    assert "All 1,024 tokens that can be found would be from 7 blocks on" in said(4)
    assert "request 5 found 1,024 of its 1,100 tokens" in said(5)
    assert "no earlier prompt begins like it." in said(2)
    ran = kvtool("prefix", "--trace", place, "--capacity", "5", "--explain-request", "6")
    assert (ran.code, "has 5 requests" in ran.err) == (2, True)


def test_the_tree_is_drawn(kvtool: Any, trace: Any) -> None:
    place = trace(line(1024, [1, 2]), line(1024, [1, 3]), line(1536, [1, 3, 4]))
    ran = kvtool("prefix", "--trace", place, "--index", "radix", "--capacity", "9", "--show-tree")
    tree = ran.out.replace("\u00a0", " ")
    for text in (
        "2,048 tokens cached",
        "└─ 512 tokens  3×",
        "   ├─ 512 tokens  2×",
        "   │  └─ 512 tokens  1×",
    ):
        assert text in tree, tree


def test_radix_against_hash_is_said(kvtool: Any) -> None:
    words = ("prefix", "--num-requests", "300", "--capacity", "100000", "--workload")
    assert "more hit tokens (" in kvtool(*words, "few-shot").out
    assert (
        "neither finds a hit. Tried in Python, a request takes the hash"
        in kvtool(*words, "unique").out
    )
    alone = kvtool(*words, "unique", "--num-prefixes", "1", "--prefix-tokens", "10").out
    assert "the hash finds none, the tree 10.0 hit tokens a request" in alone
    # Whole leaves go: the tree is behind where memory is short.
    short = kvtool(*words[:3], "--capacity", "1k", "--workload", "agent").out
    assert "as it evicts whole leaves" in short


def test_a_trace_from_standard_input(
    kvtool: Any, trace: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import io

    content = Path(trace(*chats(5))).read_bytes()

    class Stdin:
        buffer = io.BytesIO(content)

    monkeypatch.setattr("sys.stdin", Stdin)
    ran = kvtool("prefix", "--trace", "-", "--json")
    assert ran.code == 0, ran.err
    assert {row["workload"] for row in ran.json["rows"]} == {"standard input"}
    assert ran.json["rows"][-1]["requests"] == 20


def test_a_picture(kvtool: Any, trace: Any, tmp_path: Path) -> None:
    place = tmp_path / "curve.svg"
    words = ("--trace", trace(*chats(20)), "-o", str(place))
    assert kvtool("prefix", *words, "--model", "llama-3-8b").code == 0
    drawn = place.read_text()
    assert "<svg" in drawn
    ran = kvtool("prefix", *words, "--capacity", "9")
    assert (ran.code, "a curve wants several capacities" in ran.err, ran.out) == (2, True, "")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--capacity", "20GiB"], "how many tokens fit into it depends on the model"),
        (["--capacity", "20"], None),
        (["--capacity", "0"], "--capacity: 0 is out of range"),
        (["--capacity", "lots"], "--capacity: 'lots' is not a whole number"),
        (["--capacity", "gpu"], "what a GPU has left"),
        (["--capacity", "1GiB", "--model", "gemma-3-27b"], "do not keep every token alike"),
        (["--capacity", "1KiB", "--model", "llama-3-8b"], "holds 0 tokens of 131,072 bytes"),
        (["--index", "tree"], "--index: 'tree' is not known"),
        (["--policy", "mru"], "--policy: 'mru' is not known"),
        (["--block-size", "0"], "--block-size: 0 is out of range"),
        (["--cache-outputs", "some"], "--cache-outputs: 'some' is not known"),
        (["--workload", "chatt"], "called 'chatt'"),
        (["--workload", "chat", "--zipf", "x"], "--zipf: 'x' is not a number"),
        (["--workload", "chat", "--zipf", "nan"], "--zipf"),
        (["--workload", "chat", "--share", "2"], "--share"),
        (["--tenants", "team"], "--tenants is of a --trace"),
        (["--gpu", "h100"], "--gpu depends on the model"),
        (["--tiers", "cpu=1GiB@1GB/s", "--capacity", "9"], "--tiers depends on the model"),
        (["--tiers", "cpu=1GiB", "--capacity", "9", "--model", "llama-3-8b"], "is no tier"),
        (["--tiers", "cpu=1GiB@1GB/s", "--model", "llama-3-8b"], "--capacity is all of them"),
        (["--explain-request", "3"], "--capacity is all of them"),
        (["--explain-request", "0", "--capacity", "9"], "--explain-request: 0 is out of range"),
        (["--show-tree", "--index", "hash"], "--show-tree draws a radix tree"),
        (["--points", "0"], "--points: 0 is out of range"),
        (["--block-size", "1..1000", "--policy", "all"], "caches are too many at once"),
        (["--capacity", "999999999999999TiB", "--model", "llama-3-8b"], "give less"),
        (["--capacity", "9", "--tiers", "cpu=999999999999999TiB@1B/s", "--model", "llama-3-8b"],
         "holds or moves nothing"),
        (["--workload", ""], "no workload"),
        (["--model", "llama-3-8b", "--gpu", "h100", "--efficiency", "nan"], "--efficiency"),
    ],
)  # fmt: skip
def test_words_that_are_refused(kvtool: Any, words: list[str], error: str | None) -> None:
    ran = kvtool("prefix", *words, "--num-requests", "20")
    if error is None:
        assert ran.code == 0
        return
    assert ran.code != 0
    assert error in ran.err
    assert ran.err.count("\n") == 2
    assert ran.err.splitlines()[1].startswith("Hint: ")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--workload", "chat"], "--trace has its own requests"),
        (["--zipf", "1"], "--trace has its own requests: --zipf says otherwise"),
        (["--cache-outputs", "known"], "a trace does not say what was generated"),
        (["--trace-block-size", "16"], "blocks of 16 tokens for"),
    ],
)
def test_words_that_a_trace_refuses(kvtool: Any, trace: Any, words: list[str], error: str) -> None:
    ran = kvtool("prefix", "--trace", trace(*chats(2)), *words)
    assert (ran.code != 0, error in ran.err) == (True, True), ran.err


def test_a_saved_run_is_shown_as_it_was(kvtool: Any, trace: Any) -> None:
    ran = kvtool("prefix", "--trace", trace(*chats(20)), "--json").json
    shown = view(Run(command="prefix", params=ran["params"], rows=tuple(ran["rows"])))
    assert shown.tables[0].title.endswith("hit rate by capacity")
    assert any("knee" in text for text in shown.sentences)


def test_who_did_not_fit_left_nothing(kvtool: Any, trace: Any) -> None:
    large, small = line(2500, [1, 2, 3, 4, 5]), line(1500, [1, 2, 3])
    place = trace(*[large] * 6, small)
    words = ("prefix", "--trace", place, "--index", "hash", "--capacity", "4")
    said = " ".join(kvtool(*words).out.split())
    assert "here they are of requests that do not fit" in said
    said = " ".join(kvtool(*words, "--explain-request", "7").out.split())
    assert "who had the next block did not fit into the cache, and was rejected." in said
    assert "was the last to have it" not in said


def test_an_index_is_tried_at_the_largest_capacity(rows: Any) -> None:
    found = rows("--workload", "unique", "--num-requests", "100", "--capacity", "500,5000")
    tried = [row["index_tried_requests"] for row in found]
    assert tried == [None, 100, None, 100]
    assert all(found[place]["index_s_per_request"] > 0 for place in (1, 3))
    assert found[1]["naming_s_per_request"] > 0 == found[3]["naming_s_per_request"]
    assert found[1]["index_bytes"] == found[1]["cached_blocks"] * (24 + 32)


def test_what_is_not_remembered_is_not_claimed(
    kvtool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtool.sim.prefix import shared

    monkeypatch.setattr(shared, "MOST_BLOCKS", 1000)
    ran = kvtool("prefix", "--workload", "chat", "--num-requests", "100", "--capacity", "500")
    assert "A cache without end" not in ran.out
    assert "why tokens are no hits is not known" in ran.err


def test_prompts_beyond_the_model_are_noted(kvtool: Any) -> None:
    words = ("prefix", "--workload", "agent", "--num-requests", "100", "--capacity", "9k")
    ran = kvtool(*words, "--model", "llama-3-8b")
    assert "more than its 8,192: what theirs cost is by formula" in ran.err


def test_blocks_do_not_ask_what_a_window_costs(kvtool: Any, rows: Any) -> None:
    words = (
        "--workload",
        "chat",
        "--num-requests",
        "50",
        "--model",
        "gemma-3-27b",
        "--index",
        "hash",
    )
    assert rows(*words, "--capacity", "900")[0]["capacity_bytes"] is None
    ran = kvtool("prefix", *words, "--capacity", "1GiB")
    assert "Hint: give --capacity in blocks" in ran.err


def test_knees_are_of_curves_and_of_what_fits_every_request(
    rows: Any, kvtool: Any, trace: Any
) -> None:
    small = [line(5 * 512 + 1, [1, 2, *range(100 * k, 100 * k + 4)]) for k in range(5, 45)]
    large = [line(40 * 512 + 1, list(range(9000 + 50 * k, 9041 + 50 * k))) for k in range(10)]
    place = trace(*small[:20], *large, *small)
    said = " ".join(kvtool("prefix", "--trace", place).out.split())
    found = rows("--trace", place, "--index", "hash")
    assert any(row["rejected"] for row in found)
    knee = int(said.split("the knee is at ")[1].split(" tokens")[0].replace(",", ""))
    assert knee >= 41 * 512
    assert said.count("the knee is at") == 1  # of the hash alone: the tree has no curve


def test_shares_of_the_ceiling(kvtool: Any, trace: Any) -> None:
    ran = kvtool("prefix", "--trace", trace(*chats(40)))
    table = ran.out.split("every capacity")[1].split("at the largest")[0].splitlines()
    assert "50% of it" in table[1]
    assert ["≤ " in one for one in table[3:5]] == [False, True]


def test_tenants_that_look_alike_are_told_apart(rows: Any, trace: Any) -> None:
    names = ["x" * 80 + "0", "x" * 80 + "1", "a\u001b", "a?", 1, "1", " "]
    place = trace(*(line(600, [1, 2], tenant=name) for name in names))
    (row,) = rows("--trace", place, "--tenants", "tenant", "--capacity", "9", "--index", "hash")
    shown = [one["tenant"] for one in row["tenants"]]
    assert len(set(shown)) == len(names)
    assert shown[-1] == "(blank)"
    assert all(name.isprintable() and len(name) <= 34 for name in shown)


@pytest.mark.parametrize("outputs", ["all", "KNOWN", " known", "none, known"])
def test_known_outputs_of_a_trace_are_refused_however_written(
    kvtool: Any, trace: Any, outputs: str
) -> None:
    ran = kvtool("prefix", "--trace", trace(*chats(2)), "--cache-outputs", outputs)
    assert (ran.code, "a trace does not say what was generated" in ran.err) == (2, True)


def test_an_interrupt_is_one_whether_or_not_there_are_rows(
    kvtool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtool.cli import prefix_run

    real, calls = prefix_run.measure, []

    def interrupted(*words: Any) -> Any:
        calls.append(words)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return real(*words)

    monkeypatch.setattr(prefix_run, "measure", interrupted)
    words = (
        "prefix",
        "--workload",
        "chat,unique",
        "--num-requests",
        "50",
        "--capacity",
        "90",
        "--json",
    )
    ran = kvtool(*words)
    assert (ran.code, ran.json["error"]["code"]) == (130, "interrupted")
    assert {row["workload"] for row in ran.json["rows"]} == {"multi-turn-chat"}
    ran = kvtool(*words)
    assert (ran.code, ran.json["error"]["code"], ran.json["rows"]) == (130, "interrupted", [])


def test_rows_survive_a_memory_that_is_too_small(
    kvtool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtool.cli import prefix_run

    real = prefix_run.measure

    def full(prompts: Any, asked: Any) -> Any:
        if prompts.name == "unique":
            raise MemoryError
        return real(prompts, asked)

    monkeypatch.setattr(prefix_run, "measure", full)
    ran = kvtool(
        "prefix", "--workload", "chat,unique", "--num-requests", "50", "--capacity", "90", "--json"
    )
    assert (ran.code, ran.json["error"]["code"], len(ran.json["rows"])) == (1, "too_large", 2)


def test_what_changes_nothing_is_noted(kvtool: Any) -> None:
    words = ("prefix", "--num-requests", "20", "--capacity", "90", "--model", "llama-3-8b")
    ran = kvtool(*words, "--index", "radix", "--tiers", "cpu=1GiB@1GB/s")
    assert "--tiers changes nothing here" in ran.err
    assert "--weights changes nothing here" in kvtool(*words, "--weights", "1GiB").err
