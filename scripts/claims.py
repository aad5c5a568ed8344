"""Run what presets/claims/ names and put what comes out beside what was published.

    python scripts/claims.py [ID…]     prints the claims, all of them if none is named
    python scripts/claims.py --write   writes docs/claims.md

Figures of made workloads are the same every time, so a test compares the page but for its times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtool.catalog import ClaimPreset

PAGE = Path(__file__).resolve().parents[1] / "docs/claims.md"
NEAR = 0.1
"""A figure this far off a printed value is taken for reproduced; bounds and ranges hold as they are."""
UNITS = {"": (1, ""), "x": (1, "x"), "%": (100, " %"), "ms": (1000, " ms"), "s": (1, " s")}
UNITS |= {"/s": (1, "/s"), "GB": (1e-9, " GB")}
LAW = re.compile(r"\{law:([^,{}]+),([^,{}]+),([^,{}]+)\}")
"""What a step of a model on a GPU takes, in a command: {law:opt-13b,a100-40gb,fp16}."""
TOOK = re.compile(r"\d+(?:\.\d)? s of one core")
Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A field of a run's first row that is as `where` says, over another run's if there is one.

    With `within`, the largest value among the rows whose fields stay at or below these limits: a
    capacity. `per` names a field of the same row to divide by. `published` is as printed; `low` and
    `high` bound it, in the field's own unit, and decide the verdict: equal they are a printed value.
    Without both there is none. `assumes` says which number of ours the figure rests on.
    """

    name: str
    published: str = "–"
    low: float | None = None
    high: float | None = None
    run: str
    field: str
    per: str | None = None
    where: dict[str, Any] = dataclasses.field(default_factory=dict)
    within: dict[str, float] = dataclasses.field(default_factory=dict)
    over: str | None = None
    over_field: str | None = None
    over_where: dict[str, Any] = dataclasses.field(default_factory=dict)
    over_within: dict[str, float] = dataclasses.field(default_factory=dict)
    unit: str = ""
    assumes: str = ""

    @property
    def title(self) -> str:
        """Its name, with what it rests on."""
        return f"{self.name} (assumes {self.assumes})" if self.assumes else self.name

    def value(self, rows: Mapping[str, Sequence[Row]]) -> float:
        """What our runs make of it."""
        value = self._read(self.run, self.field, rows, self.where, self.within)
        if self.over is None:
            return value
        below = self.over_field or self.field
        return value / self._read(self.over, below, rows, self.over_where, self.over_within)

    def verdict(self, value: float) -> str:
        """`yes`, `no`, `reversed` (a gain that is a loss, or the other way), or `–` if nothing was
        published that it could be held against."""
        if self.low is None and self.high is None:
            return "–"
        low = -float("inf") if self.low is None else self.low
        high = float("inf") if self.high is None else self.high
        if low == high:
            low, high = low * (1 - NEAR), high * (1 + NEAR)
        if low <= value <= high:
            return "yes"
        gain = self.low is not None and self.low > 1
        loss = self.high is not None and self.high < 1
        turned = (gain and round(value, 2) < 1) or (loss and round(value, 2) > 1)
        return "reversed" if self.unit == "x" and turned else "no"

    def shown(self, value: float) -> str:
        """Three digits and the unit."""
        times, unit = UNITS[self.unit]
        scaled = value * times
        digits = f"{scaled:,.0f}" if abs(scaled) >= 100 else f"{scaled:#.3g}".rstrip(".")
        return digits + unit

    def _read(
        self, run: str, named: str, rows: Mapping[str, Sequence[Row]], where: Row, within: Row
    ) -> float:
        found = [
            row for row in rows[run] if all(row[name] == value for name, value in where.items())
        ]
        if within:
            found = [row for row in found if all(row[n] <= most for n, most in within.items())]
        if not found:
            raise SystemExit(f"{self.name}: no row of {run} is as it says")
        values = [row[named] / (row[self.per] if self.per else 1) for row in found]
        return float(max(values) if within else values[0])


def figures_of(claim: ClaimPreset) -> list[Figure]:
    """Its figures, read strictly: a misspelt key is a TypeError."""
    return [Figure(**one) for one in claim.figures]


def filled(command: str) -> str:
    """A command with the laws that it names written out, as kvtool.step_law has them."""

    def law(match: re.Match[str]) -> str:
        from kvtool.config import load_config
        from kvtool.prefill import prefill_of
        from kvtool.sim.settings import StepTime
        from kvtool.step_law import law_of

        model, gpu, dtype = match.groups()
        found = law_of(prefill_of(load_config, model, gpu=gpu, dtype=dtype)).step_time
        usual = dataclasses.asdict(StepTime())
        terms = {k: v for k, v in dataclasses.asdict(found).items() if v != usual[k]}
        return ",".join(f"{name}={value}" for name, value in terms.items())

    return LAW.sub(law, command)


def words_of(command: str) -> list[str]:
    """A command as an argument list, without the name kvtool."""
    return shlex.split(filled(command))


def rows_of(command: str, *more: str) -> list[Row]:
    """The rows of `kvtool COMMAND`."""
    from kvtool.cli.main import run

    page = io.StringIO()
    with contextlib.redirect_stdout(page):
        code = run([*words_of(command), *more, "--json", "-q"])
    if code:
        raise SystemExit(f"kvtool {command}: exit code {code}")
    rows: list[Row] = json.loads(page.getvalue())["rows"]
    return rows


def section(claim: ClaimPreset) -> tuple[str, list[tuple[str, str, str, str]]]:
    """The claim's part of the page, and its figures' cells."""
    start = time.process_time()
    rows = {name: rows_of(command) for name, command in claim.runs.items()}
    took = time.process_time() - start
    cells = []
    for one in figures_of(claim):
        value = one.value(rows)
        cells.append((one.title, one.published, one.shown(value), one.verdict(value)))
    lines = [f"| {' | '.join(line)} |" for line in cells]
    commands = [f"# {name}\nkvtool {filled(command)}" for name, command in claim.runs.items()]
    parts = [
        f"## {claim.id}: {claim.name}",
        f"**Its first figure: {cells[0][-1]}; of its figures, reproduced: {together(cells)}.** "
        f"{sentence(claim.reason)}",
        f"Published: {sentence(claim.published)} Status: {sentence(claim.status)}",
        "\n".join(["| | published | ours | reproduced? |", "|---|--:|--:|---|", *lines]),
        "```sh\n" + "\n".join(commands) + "\n```",
        f"Chosen by us or missing: {sentence(claim.note)}",
        f"Source: {sentence(claim.source)}",
        f"Took {took:.1f} s of one core.",
    ]
    return "\n\n".join(parts), cells


def together(cells: Sequence[tuple[str, str, str, str]]) -> str:
    """`2 of 5`: of the figures that something was published to hold against."""
    held = [one[-1] for one in cells if one[-1] != "–"]
    return f"{held.count('yes')} of {len(held)}"


def sentence(text: str) -> str:
    """One line that ends with a full stop."""
    line = " ".join(text.split())
    return line if line.endswith((".", "?")) else f"{line}."


def page(claims: Sequence[ClaimPreset]) -> str:
    """Every claim with what came of it."""
    found = [(claim, *section(claim)) for claim in claims]
    rows = [
        f"| [{claim.id}](#{anchor(claim)}) | {' | '.join(cells[0])} | {together(cells)} |"
        for claim, _, cells in found
    ]
    head = f"""\
# Published claims, tried

Written by `python scripts/claims.py --write` from `presets/claims/` (`kvtool presets claims` lists them,
`kvtool presets --show radix-5x` prints one). Each is run with the commands shown; the first figure is what
a claim is known for.

**Reproduced?** *yes*: at most {NEAR:.0%} off a printed value, or inside a published range or limit (words that were
read as numbers say so). *no*: further off. *reversed*: what was published as a gain is a loss here, or the
other way. A dash: nothing was published that it could be held against.

What a step takes is a roofline of model and GPU, with half of the peak for computing, 0.8 of the bandwidth
for reading and 1 ms a step for the host: estimates, never a measured engine. So ratios say what the
allocator, the scheduler or the cache does; they do not contain what better kernels, CUDA graphs or a faster
front end brought. Figures 2 and 15 of the vLLM paper are in [accuracy.md](accuracy.md).

| claim | its first figure | published | ours | reproduced? | of its figures, reproduced |
|---|---|--:|--:|---|---|
"""
    return head + "\n".join([*rows, "", *[text + "\n" for _, text, _ in found]]).rstrip() + "\n"


def anchor(claim: ClaimPreset) -> str:
    """What GitHub makes of the heading."""
    return re.sub(r"[^a-z0-9 _-]", "", f"{claim.id}: {claim.name}".lower()).replace(" ", "-")


def without_times(text: str) -> str:
    """The page but for how long it took."""
    return TOOK.sub("– s of one core", text)


def main(words: Sequence[str]) -> int:
    """Print the claims that are named, or write them all."""
    from kvtool.catalog import claim_preset, claim_presets

    names = [word for word in words if word != "--write"]
    if "--write" in words and names:
        print("--write writes every claim: leave out the names", file=sys.stderr)
        return 2
    if "--write" in words:
        PAGE.write_text(page(claim_presets()), "utf-8")
        print(f"written: {PAGE.name}")
        return 0
    claims = [claim_preset(name) for name in names] or claim_presets()
    print("\n\n".join(section(claim)[0] for claim in claims))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
