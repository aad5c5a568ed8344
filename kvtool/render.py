"""A run and its view as text: JSON lines, CSV, Markdown and terminal tables."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TextIO

from kvtool.run import Run, spell_controls
from kvtool.view import Table, View

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 10_000
"""Columns of a console that is no terminal: nothing is ever cut or wrapped in a pipe."""

NO_BREAK = "\u00a0"
_BLANKS = re.compile(rf"[^\S{NO_BREAK}]+")

FORMULAS = ("=", "+", "-", "@")
"""How a spreadsheet knows a formula: a name from a stranger that starts so gets a quote before it."""


def one_line(text: str) -> str:
    """The text on one line, its control characters spelled out: names come from strangers.

    Blanks that do not break stay as they are: a tree's lines are indented by them.
    """
    flat = _BLANKS.sub(" ", text).strip(" ")
    return "".join(
        c if c.isprintable() or c == NO_BREAK else c.encode("unicode_escape").decode() for c in flat
    )


def encodable(text: str, encoding: str) -> str:
    r"""The text with what the encoding lacks as \uXXXX, which JSON reads back unchanged."""
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return "".join(c if _fits(c, encoding) else json.dumps(c)[1:-1] for c in text)
    return text


def _fits(character: str, encoding: str) -> bool:
    try:
        character.encode(encoding)
    except UnicodeEncodeError:
        return False
    return True


def json_text(run: Run, view: View) -> str:
    """The run itself: the same object for every command."""
    return run.to_json() + "\n"


def jsonl_text(run: Run, view: View) -> str:
    """One row a line, so that files of several runs concatenate."""
    lines = (json.dumps(row, ensure_ascii=False, allow_nan=False) for row in run.rows)
    return "".join(f"{spell_controls(line)}\n" for line in lines)


def csv_text(run: Run, view: View) -> str:
    """The rows: columns in order of first appearance, nested values as JSON in their cell."""
    columns = list(dict.fromkeys(key for row in run.rows for key in row))
    if not columns:
        return ""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_csv_cell(row.get(column)) for column in columns] for row in run.rows)
    return out.getvalue()


def _csv_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        text = one_line(value)
        return f"'{text}" if text.startswith(FORMULAS) else text
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def markdown_text(run: Run, view: View) -> str:
    """The tables as GitHub tables, the sentences as paragraphs above and below them."""
    blocks = [one_line(sentence) for sentence in view.lead]
    blocks += [_markdown_table(table) for table in view.tables]
    blocks += [one_line(sentence) for sentence in view.sentences]
    return "\n\n".join(blocks) + "\n" if blocks else ""


def _markdown_table(table: Table) -> str:
    cells = [[_markdown_cell(cell) for cell in row] for row in (table.columns, *table.rows)]
    widths = [max(3, *map(len, column)) for column in zip(*cells, strict=True)]
    right = [column in table.right for column in table.columns]
    rule = ["-" * (w - 1) + ":" if r else "-" * w for w, r in zip(widths, right, strict=True)]
    lines = [_markdown_row(row, widths, right) for row in (cells[0], rule, *cells[1:])]
    title = [f"**{_markdown_cell(table.title)}**", ""] if table.title else []
    return "\n".join([*title, *lines])


def _markdown_row(cells: Iterable[str], widths: list[int], right: list[bool]) -> str:
    padded = (
        cell.rjust(width) if is_right else cell.ljust(width)
        for cell, width, is_right in zip(cells, widths, right, strict=True)
    )
    return f"| {' | '.join(padded)} |"


def _markdown_cell(text: str) -> str:
    return one_line(text).replace("|", "\\|").replace("<", "\\<")


class _Page(io.StringIO):
    """Text made for a stream: what rich asks about the stream is answered, nothing is written."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self.stream = stream

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding or "utf-8"

    def isatty(self) -> bool:
        return self.stream.isatty()


def table_text(view: View, stream: TextIO) -> str:
    """The view as tables for the stream: its width and colours on a terminal, all of it in a pipe."""
    page = _Page(stream)
    console = _console(page)
    for sentence in view.lead:
        console.print(one_line(sentence))
    for index, table in enumerate(view.tables):
        if index or view.lead:
            console.print()
        _print_table(console, table)
    if view.tables and view.sentences:
        console.print()
    for sentence in view.sentences:
        console.print(one_line(sentence))
    if stream.isatty():
        return page.getvalue()
    return "".join(f"{line.rstrip()}\n" for line in page.getvalue().splitlines())


def _console(page: _Page) -> Console:
    from rich.console import Console

    # A pipe has no width: both numbers, or rich takes 80 columns for TERM=dumb.
    width, height = (None, None) if page.isatty() else (WIDE, 100)
    return Console(
        file=page,
        width=width,
        height=height,
        markup=False,
        emoji=False,
        highlight=False,
        force_jupyter=False,
    )


def _print_table(console: Console, table: Table) -> None:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    if table.title:
        console.print(Text(one_line(table.title), style="bold"))
    grid = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for column in table.columns:
        grid.add_column(
            one_line(column),
            justify="right" if column in table.right else "left",
            overflow="fold",  # a narrow terminal breaks a cell, it never hides the end of it
        )
    for row in table.rows:
        grid.add_row(*(Text(one_line(cell)) for cell in row))
    console.print(grid)
