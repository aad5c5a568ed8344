"""The run of `kvtool prefix`: one set of prompts after the other."""

from __future__ import annotations

from kvtool.cli.prefix_words import MOST_CASES, Words
from kvtool.errors import INTERRUPTED, KvtoolError, usage_error
from kvtool.output import Output
from kvtool.prefix import BELOW, GRID, measure
from kvtool.prompts import Prompts
from kvtool.run import Row
from kvtool.sim.prefix.replay import compiles
from kvtool.sim.prefix.shared import MOST_BLOCKS


def run_all(words: Words, out: Output) -> tuple[list[Row], list[str], KvtoolError | None]:
    """All rows, notes, and what ended the run early; raised if there are no rows at all."""
    rows: list[Row] = []
    notes = list(words.notes)
    for place, prompts in enumerate(words.prompts):
        try:
            rows += _run(words, prompts, out)
        except KeyboardInterrupt:
            stopped = _interrupted(place, len(words.prompts))
        except MemoryError:
            stopped = _too_large(prompts)
        except KvtoolError as error:
            stopped = error
        else:
            notes += [f"{prompts.name}: {note}" for note in prompts.notes]
            continue
        if not rows:
            raise stopped
        return rows, notes, stopped
    return rows, list(dict.fromkeys(notes)), None


def _run(words: Words, prompts: Prompts, out: Output) -> list[Row]:
    what = "reading" if prompts.is_trace else "making"
    with out.progress(f"{what} {prompts.name}", prompts.total) as advance:
        prompts.progress = advance
        asked = words.asked(prompts)
        count = len(asked.kinds) * (len(asked.rooms) + (GRID + BELOW if asked.all_rooms else 0))
        if count > MOST_CASES:
            raise usage_error(
                f"{count:,} caches are too many at once",
                f"ask for at most {MOST_CASES:,}",
            )
        if any(compiles(kind.cache(1)) for kind in asked.kinds):
            out.aside("compiling the replays, once on this machine: about 10 s")
        rows = measure(prompts, asked)
    if any(row["new_tokens"] is None for row in rows):
        out.note(
            f"{prompts.name}: more than {MOST_BLOCKS:,} different blocks, so why tokens are no hits is not "
            "known, nor the ceiling"
        )
    if words.max_context is not None and prompts.longest > words.max_context:
        out.note(
            f"{asked.model}: prompts have up to {prompts.longest:,} tokens, more than its "
            f"{words.max_context:,}: what theirs cost is by formula"
        )
    if asked.explained is not None and rows[0]["requests"] < asked.explained:
        raise usage_error(
            f"--explain-request {asked.explained:,}: {prompts.name} has "
            f"{rows[0]['requests']:,} requests",
            "give a lower number: requests count from 1",
        )
    return rows


def _too_large(prompts: Prompts) -> KvtoolError:
    return KvtoolError(
        f"{prompts.name}: the memory of this machine is not enough for these caches",
        "take larger blocks, fewer caches, fewer --points or --num-requests",
        code="too_large",
    )


def _interrupted(done: int, asked: int) -> KvtoolError:
    what = "the prompts" if asked == 1 else f"{done:,} of {asked:,} sets of prompts"
    return KvtoolError(
        f"interrupted {'over ' + what if asked == 1 else 'after ' + what}",
        "what was done so far is above; run again for the rest" if done else "run again",
        code="interrupted",
        exit_code=INTERRUPTED,
    )
