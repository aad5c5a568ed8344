"""The one mouth of kvtool: results to stdout or a file, everything else to stderr."""

from __future__ import annotations

import errno
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from kvtool import render
from kvtool.errors import INTERRUPTED, KvtoolError, did_you_mean, missing_matplotlib, usage_error
from kvtool.run import Run

if TYPE_CHECKING:
    from kvtool.view import View

LONGEST_LINE = 1_000
"""Characters of a note or an error: what a stranger's file says is cut."""
FORMATS = ("table", "json", "csv", "md")
PICTURES = {".png": "png", ".svg": "svg"}

_TEXT: dict[str, Callable[[Run, View], str]] = {
    "json": render.json_text,
    "jsonl": render.jsonl_text,
    "csv": render.csv_text,
    "md": render.markdown_text,
}
_SUFFIXES = {".json": "json", ".jsonl": "jsonl", ".csv": "csv", ".md": "md", **PICTURES}

_FILE_TROUBLE = {
    errno.ENOENT: ("the folder does not exist", "create the folder, or choose another"),
    errno.ENOTDIR: ("a part of the path is not a folder", "choose another path"),
    errno.EISDIR: ("it is a folder", "name a file in it"),
    errno.EACCES: ("permission denied", "choose a folder that you may write to"),
    errno.EPERM: ("permission denied", "choose a folder that you may write to"),
    errno.EROFS: ("the file system is read-only", "choose a folder that you may write to"),
    errno.ENOSPC: ("no space left", "free some space, or choose another disk"),
    errno.EDQUOT: ("the quota is used up", "free some space, or choose another disk"),
    errno.EFBIG: ("the file is too large", "raise the limit (ulimit -f), or choose another disk"),
    errno.ENAMETOOLONG: ("the name is too long", "choose a shorter name"),
}


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@dataclass(kw_only=True)
class Output:
    """Where a command's words go: the format, the file, and the two streams, all injected."""

    format: str = "table"
    path: Path | None = None
    print_result: bool = True
    quiet: bool = False
    verbose: bool = False
    stdout: TextIO = field(default_factory=lambda: _open(sys.stdout))
    stderr: TextIO = field(default_factory=lambda: _open(sys.stderr))
    noted: list[str] = field(default_factory=list)

    def emit(self, run: Run, view: View, *, failed: KvtoolError | None = None) -> None:
        """Deliver the result; `failed` is a gate that was not met: said in the run, then raised."""
        run = replace(run, notes=tuple(dict.fromkeys((*self.noted, *run.notes))))
        if failed is not None:
            run = replace(run, error=failed.to_dict())
        if self.path is not None:  # first: a stdout that is full must not cost the file
            self._save(self.path, run, view)
        if self.print_result:
            self.data(self._text(run, view))
        for text in run.notes:
            if text not in self.noted:
                self.note(text)
        if self.path is not None:
            self._tell("Note", f"written to {self.path}")
        if failed is not None:
            failed.in_output = self.print_result
            raise failed

    def _save(self, path: Path, run: Run, view: View) -> None:
        """The result as a file. If that fails it is printed after all: nothing found is lost."""
        try:
            write_file(path, self._file_content(run, view))
        except Exception as error:
            self.data(self._text(run, view))
            if isinstance(error, KvtoolError):
                error.in_output = self.print_result
            raise

    def data(self, text: str) -> None:
        """Write to stdout at once; a reader that went away is no error, a full disk is."""
        try:
            self.stdout.write(render.encodable(text, self.stdout.encoding or "utf-8"))
            self.stdout.flush()
        except BrokenPipeError:
            silence(self.stdout)
        except KeyboardInterrupt as end:  # a second document behind half of one is none
            silence(self.stdout)
            error = KvtoolError(
                "interrupted while the result was being written",
                "what its reader has may be cut: run again, or name a file with -o",
                code="interrupted",
                exit_code=INTERRUPTED,
            )
            error.in_output = True
            raise error from end
        except OSError as error:
            silence(self.stdout)
            raise write_error(error) from error

    def note(self, text: str) -> None:
        """What a reader must know: once on stderr, and in the JSON's `notes` (only there with it)."""
        if text not in self.noted:
            self.noted.append(text)
            if not (self.print_result and self.format == "json"):
                self._tell("Note", text)

    def aside(self, text: str) -> None:
        """What is true of this moment only: on stderr, never in the notes of the run."""
        self._tell("Note", text)

    def detail(self, text: str) -> None:
        """What only `-v` wants to know, on stderr."""
        if self.verbose:
            self._tell("Note", text)

    def error(self, error: KvtoolError, *, command: str = "") -> None:
        """The two lines of an error, and with JSON its object on stdout unless a run had it."""
        if self.format == "json" and not error.in_output:
            run = Run(
                command=command,
                params=error.params,
                notes=tuple(self.noted),
                error=error.to_dict(),
            )
            # A stdout that cannot be written may be the error that is being told.
            with suppress(KvtoolError):
                self.data(run.to_json() + "\n")
        self._line("Error", error.message, colour="31")
        self._line("Hint", error.hint, colour="36")

    @contextmanager
    def progress(self, text: str, total: float | None = None) -> Iterator[Callable[[float], None]]:
        """A bar on stderr that vanishes; only on a terminal. Yields a function to advance it."""
        if self.quiet or not self.stderr.isatty():
            yield lambda steps: None
            return
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(file=self.stderr), transient=True) as bar:
            task = bar.add_task(text, total=total)
            yield lambda steps: bar.advance(task, steps)

    def _text(self, run: Run, view: View) -> str:
        if self.format == "table":
            return render.table_text(view, self.stdout)
        return _TEXT[self.format](run, view)

    def _file_content(self, run: Run, view: View) -> bytes:
        assert self.path is not None
        format = format_of(self.path)
        if format in _TEXT:
            return render.encodable(_TEXT[format](run, view), "utf-8").encode()
        if view.chart is None:
            raise usage_error(
                f"-o {self.path}: this result has no chart to draw",
                "use a suffix for text: .json, .jsonl, .csv or .md",
            )
        from kvtool.plot import draw

        return draw(view.chart, format)

    def _tell(self, label: str, text: str) -> None:
        if not self.quiet:
            self._line(label, text, colour="2")

    def _line(self, label: str, text: str, *, colour: str) -> None:
        start, end = (f"\x1b[{colour}m", "\x1b[0m") if _has_colour(self.stderr) else ("", "")
        text = render.one_line(text)
        text = text if len(text) <= LONGEST_LINE else f"{text[:LONGEST_LINE]}…"
        line = f"{start}{label}:{end} {text}\n"
        try:
            self.stderr.write(render.encodable(line, self.stderr.encoding or "utf-8"))
            self.stderr.flush()
        except OSError:  # there is nowhere left to say so
            silence(self.stderr)


def format_of(path: Path) -> str:
    """The file format that a path's suffix asks for."""
    suffix = path.suffix.lower()
    if suffix in _SUFFIXES:
        return _SUFFIXES[suffix]
    works = "these suffixes work: " + " ".join(_SUFFIXES)
    if suffix == ".html":
        raise usage_error(f"-o {path}: HTML files are not available yet", works)
    what = f"the suffix '{suffix}' is not known" if suffix else "no suffix says which format"
    raise usage_error(f"-o {path}: {what}", works + "." + did_you_mean(suffix, _SUFFIXES))


def check_file(path: Path) -> None:
    """Refuse at once what would fail after the work: suffix, folder, matplotlib."""
    format = format_of(path)
    check_writable(path)
    if format in PICTURES.values() and importlib.util.find_spec("matplotlib") is None:
        raise missing_matplotlib()


def check_writable(path: Path) -> None:
    """Refuse at once a file that could not be written after the work."""
    try:
        is_folder = path.is_dir()
    except OSError as error:  # a name that is too long, a folder that may not be searched
        raise write_error(error, str(path)) from error
    if is_folder:
        raise write_error(OSError(errno.EISDIR, ""), str(path))
    if os.path.lexists(path) and not path.is_file():
        raise KvtoolError(
            f"cannot write {path}: it is a device, a pipe or a broken link, not a file",
            "name a file, or leave out -o and redirect standard output",
            code="write_failed",
        )
    if not path.parent.is_dir():
        missing = errno.ENOTDIR if path.parent.exists() else errno.ENOENT
        raise write_error(OSError(missing, ""), str(path))
    if not os.access(path.parent, os.W_OK):
        raise write_error(OSError(errno.EACCES, ""), str(path))


def check_not_read(path: Path | None, models: Iterable[str]) -> None:
    """Refuse to write over a file that the run reads: a model's, or what stands on stdin."""
    for model in models:
        with suppress(OSError, ValueError):
            if path is not None and _reads(model, path):
                raise usage_error(
                    f"-o {path}: it is a file that is read", "choose another name for the result"
                )


def _reads(model: str, path: Path) -> bool:
    if model == "-":
        return os.path.samestat(os.fstat(0), path.stat())
    place = Path(model)
    beside = place if place.is_dir() else place.parent
    read = (place, beside / "config.json", beside / "hf_quant_config.json")
    return any(file.exists() and path.samefile(file) for file in read)


def write_file(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Put the whole content there, or leave what was: a file beside it, then one rename.

    The content may come in parts, so that it need not be held as a whole.
    """
    target = Path(os.path.realpath(path))  # a link stays, the file behind it changes
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with draft.open("wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
        if target.exists():
            draft.chmod(target.stat().st_mode & 0o7777)
        draft.replace(target)
    except OSError as error:
        raise write_error(error, str(path)) from error
    finally:
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def write_error(error: OSError, name: str = "standard output") -> KvtoolError:
    """The two lines for what could not be written."""
    reason, hint = _FILE_TROUBLE.get(
        error.errno or 0, (error.strerror or type(error).__name__, "choose another path")
    )
    return KvtoolError(f"cannot write {name}: {reason}", hint, code="write_failed")


def silence(stream: TextIO) -> None:
    """Send what follows nowhere, so that the interpreter's last flush does not complain."""
    with suppress(OSError, ValueError, AttributeError):
        descriptor = stream.fileno()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


def _open(stream: TextIO | None) -> TextIO:
    """The stream, or nowhere when the shell closed it (`>&-`)."""
    return stream if stream is not None else Path(os.devnull).open("w")


def _has_colour(stream: TextIO) -> bool:
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") in ("dumb", "unknown")
    return stream.isatty() and not plain
