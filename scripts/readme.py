"""Write what kvtool prints into README.md and docs/: console blocks, generated tables, one picture.

    python scripts/readme.py            rewrites what has changed
    python scripts/readme.py --check    names what differs and exits 1

A block stands between two comments, `<!-- run: size llama-3-70b -->` or `<!-- made: NAME -->`, and
`<!-- end -->`. What a run printed is shown as a terminal of 100 columns shows it, without its styles.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 100
PICTURE = ROOT / "docs/size.svg"
PICTURE_OF = "size gemma-3-27b -c 8k,128k --explain"

BLOCK = re.compile(r"<!-- (run|made): (.+?) -->\n(.*?)<!-- end -->", re.DOTALL)
STYLE = re.compile(r"\x1b\[[0-9;]*m")
INDENTED = re.compile(r' x="([\d.]+)" y="([\d.]+)" textLength="([\d.]+)"([^>]*)>((?:&#160;)+)')
CELL = 12.2  # rich's width of a character

SIZED_AT_32K = (
    "llama-3.1-70b", "gemma-3-27b", "gpt-oss-20b", "mistral-7b-v0.1", "llama-4-scout",
    "gemma-3n-e4b", "deepseek-v3", "qwen3-next-80b-a3b", "jamba-v0.1",
)  # fmt: skip
READ_WRONG = {  # model: what is decided, and what a plain reading of the config makes of it
    "falcon-7b": ("kv_heads", "71, as `num_attention_heads` says"),
    "falcon-40b": ("kv_heads", "128, as `num_attention_heads` says"),
    "qwen3-32b": ("k_head_dim", "80, as `hidden_size / num_attention_heads` makes it"),
    "t5-large": ("kv_heads", "none: `num_key_value_heads` is not there"),
    "gemma-3-4b": ("kv_heads", "none: the published file leaves the key out"),
}


class Terminal(io.StringIO):
    """Both streams of one run, in the order in which a terminal would show them."""

    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        """True: tables wrap at the terminal's width, and text is styled."""
        return True


@contextlib.contextmanager
def terminal(**environ: str) -> Iterator[None]:
    """The environment of that terminal: no variable of this shell reaches the documents."""
    before = dict(os.environ)
    for name in [n for n in os.environ if n.startswith(("KVTOOL_", "HF_", "COLOR"))]:
        del os.environ[name]
    os.environ.update({"COLUMNS": str(WIDTH), "TERM": "xterm-256color", "HF_HUB_OFFLINE": "1"})
    os.environ.update(environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def shown(command: str) -> str:
    """What a terminal shows of `kvtool COMMAND`, styles included; the run may end in an error."""
    from kvtool.cli.main import run

    page = Terminal()
    with terminal(), contextlib.redirect_stdout(page), contextlib.redirect_stderr(page):
        run(shlex.split(command))
    return page.getvalue()


def rows(command: str) -> list[dict[str, Any]]:
    """The rows of `kvtool COMMAND --json`."""
    from kvtool.cli.main import run

    page = io.StringIO()
    with terminal(), contextlib.redirect_stdout(page):
        code = run([*shlex.split(command), "--json", "-q"])
    if code != 0:
        raise SystemExit(f"kvtool {command}: exit code {code}")
    found: list[dict[str, Any]] = json.loads(page.getvalue())["rows"]
    return found


def console(command: str) -> str:
    """A block that shows the command as it is typed, and what comes of it; of `| head -N` the first lines."""
    typed, _, count = command.partition(" | head -")
    lines = [line.rstrip() for line in STYLE.sub("", shown(typed)).splitlines()]
    lines = lines[: int(count)] if count else lines
    return "\n".join(["```console", f"$ kvtool {command}", *lines, "```", ""])


def table(columns: tuple[str, ...], cells: list[tuple[str, ...]], *, right: str = "") -> str:
    """A Markdown table; `right` names the columns whose numbers stand to the right."""
    rule = ["--:" if name in right.split(",") else "---" for name in columns]
    lines = [f"| {' | '.join(line)} |\n" for line in (columns, *cells)]
    return "".join([lines[0], f"|{'|'.join(rule)}|\n", *lines[1:]])


def sized() -> str:
    """Hard models at 32k tokens: the size, what the plain formula says, and why it differs."""
    from kvtool.run import Run
    from kvtool.units import format_bytes
    from kvtool.view.size import view

    cells = []
    for row in rows(f"size {' '.join(SIZED_AT_32K)} -c 32k"):
        said = " ".join(view(Run(command="size", params={}, rows=(row,))).sentences)
        wrong = re.search(r"would say .+?, (.+?): (.+?)\.(?: |$)", said)
        off, why = wrong.groups() if wrong else ("right", "")
        plain = f"{row['plain_bytes']:,}"
        size = f"{row['total_bytes']:,}"
        cells.append((row["model"], size, format_bytes(row["total_bytes"]), plain, off, why or "–"))
    columns = ("model", "bytes at 32k", "", "plain formula", "", "why")
    return table(columns, cells, right="bytes at 32k,,plain formula")


def keys() -> str:
    """Configs whose plain reading is wrong: the key that decides, and what it is mistaken for."""
    cells = []
    for model, (what, mistaken) in READ_WRONG.items():
        kind = rows(f"size {model} -c 512 --allow-long")[0]["kinds"][0]
        cells.append((model, f"{what} = {kind[what]}", kind["decided_by"][what], mistaken))
    return table(("model", "right", "decided by", "a plain reading"), cells)


def prefixes() -> str:
    """Made workloads: what a prompt is, and what caches without end find of 2,000 requests."""
    from kvtool.catalog import prefix_presets

    found: dict[str, dict[str, Any]] = {}
    for row in rows(f"prefix --workload all --capacity {2**24}"):
        found.setdefault(row["workload"], {})[row["index"]] = row
    cells = []
    for preset in prefix_presets():
        one = found[preset.id]
        tokens = one["hash"]["queried_tokens"] / one["hash"]["requests"]
        rates = (f"{one[index]['hit_rate']:.1%}" for index in ("hash", "radix"))
        cells.append((f"`{preset.id}`", preset.name, f"{tokens:,.0f}", *rates))
    columns = ("--workload", "prompts", "mean tokens", "hash finds", "radix finds")
    return table(columns, cells, right=",".join(columns[2:]))


def cell(text: str) -> str:
    """Text that a Markdown table can hold."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def usage_of(param: Any) -> str:
    """`-c`, `--context TOKENS`, as the help has it."""
    if param.param_type_name == "argument":
        return f"`{param.metavar or param.name}`"
    names = sorted((*param.opts, *param.secondary_opts), key=len)
    value = "" if getattr(param, "is_flag", False) else f" {param.metavar or 'TEXT'}"
    return ", ".join(f"`{name}`" for name in names[:-1]) + (
        f"{', ' if names[1:] else ''}`{names[-1]}{value}`"
    )


def meaning_of(param: Any) -> str:
    """The help's sentence and the default, if it shows one."""
    text = cell(getattr(param, "help", "") or "")
    default = param.default
    if getattr(param, "is_flag", False) or default is None or not param.show_default:
        return text
    return f"{text} Default: `{default}`."


def options_of(command: Any, context: Any) -> str:
    """A table for each panel of the help."""
    panels: dict[str, list[tuple[str, ...]]] = {}
    for param in command.get_params(context):
        name = getattr(param, "rich_help_panel", None)
        name = name or ("Arguments" if param.param_type_name == "argument" else "Options")
        panels.setdefault(name, []).append((usage_of(param), meaning_of(param)))
    return "\n".join(table((name.lower(), "meaning"), cells) for name, cells in panels.items())


def commands_of(name: str, command: Any) -> list[tuple[str, Any]]:
    """A command itself, or each command of a group under its own heading."""
    inner = getattr(command, "commands", None)
    if not inner:
        return [("", command)]
    return [
        (f"### kvtool {name} {key}\n\n{one.get_short_help_str(200)}", one)
        for key, one in inner.items()
    ]


def reference() -> str:
    """Every command with its arguments, options and examples, from the help itself."""
    import typer

    from kvtool.cli import main as cli

    group = typer.main.get_command(cli.app)
    with group.make_context("kvtool", [], resilient_parsing=True) as context:
        parts = ["## kvtool", options_of(group, context)]
        for name, entry in cli.COMMANDS.items():
            command = cli.LazyCommand(name, entry).load()
            words = {"presets": " [KIND]", "size": " MODEL…", "check": " MODEL…"}.get(name, "")
            parts += [f"## kvtool {name}{words}", entry.summary]
            for title, one in commands_of(name, command):
                with one.make_context(title, [], parent=context, resilient_parsing=True) as own:
                    parts += [title, options_of(one, own)] if title else [options_of(one, own)]
            examples = re.findall(r"kvtool [^·\n]+", command.epilog or "")
            parts.append("```\n" + "\n".join(line.strip() for line in examples) + "\n```")
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


MADE: dict[str, Callable[[], str]] = {
    "sized": sized, "keys": keys, "prefixes": prefixes, "reference": reference,
}  # fmt: skip


def filled(text: str) -> str:
    """The document with every block as it must be now."""

    def block(match: re.Match[str]) -> str:
        kind, what = match[1], match[2]
        content = console(what) if kind == "run" else MADE[what]()
        return f"<!-- {kind}: {what} -->\n{content}<!-- end -->"

    return BLOCK.sub(block, text)


def picture() -> str:
    """The terminal with one command in it, as an SVG that loads nothing from elsewhere."""
    from rich.console import Console
    from rich.terminal_theme import DIMMED_MONOKAI
    from rich.text import Text

    page = Console(record=True, width=WIDTH, file=io.StringIO(), color_system="truecolor")
    page.print(Text.assemble(("$ ", "bold green"), (f"kvtool {PICTURE_OF}", "bold")))
    for line in shown(PICTURE_OF).rstrip().splitlines():
        page.print(Text.from_ansi(line.rstrip()), soft_wrap=True)
    svg = page.export_svg(title="kvtool", theme=DIMMED_MONOKAI, unique_id="kvtool")
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    svg = svg.replace("Fira Code, monospace", "'DejaVu Sans Mono', Menlo, Consolas, monospace")
    svg = INDENTED.sub(_moved, svg)
    return "\n".join(line.rstrip() for line in svg.splitlines()) + "\n"


def _moved(match: re.Match[str]) -> str:
    """The same text without its first blanks, further right: not every viewer draws blanks."""
    x, y, length, rest, blanks = match.groups()
    shift = CELL * (len(blanks) // len("&#160;"))
    return f' x="{float(x) + shift:g}" y="{y}" textLength="{float(length) - shift:g}"{rest}>'


def main() -> int:
    """Compare or write every document and the picture."""
    documents = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    wanted = {path: filled(path.read_text("utf-8")) for path in documents} | {PICTURE: picture()}
    differs = [
        path
        for path, text in wanted.items()
        if not path.exists() or path.read_text("utf-8") != text
    ]
    names = ", ".join(str(path.relative_to(ROOT)) for path in differs)
    if "--check" in sys.argv:
        print(f"{names}: run scripts/readme.py" if differs else "the documents are up to date")
        return 1 if differs else 0
    for path in differs:
        path.write_text(wanted[path], "utf-8")
    print(f"written: {names}" if differs else "nothing has changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
