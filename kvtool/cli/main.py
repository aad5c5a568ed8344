"""The command `kvtool`: its sub-commands, imported when called, and the one edge for errors."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from kvtool import __version__
from kvtool.cli.options import PlainCommand, wants_json, without_flag_types
from kvtool.errors import INTERRUPTED, USAGE, KvtoolError, did_you_mean, usage_error
from kvtool.output import DISK_FULL, Output, write_error

ANALYSE, MEASURE = "Analyse", "Measure"
DEBUG_VARIABLE = "KVTOOL_DEBUG"
COMPLETE_VARIABLE = "_KVTOOL_COMPLETE"  # set by the shell script that typer writes


class Entry(NamedTuple):
    """A command that is not imported yet: where its function is, and its line in the help."""

    module: str
    panel: str
    summary: str
    inner: tuple[str, ...] = ()
    """The commands of a group that go by both names."""


COMMANDS: dict[str, Entry] = {
    "size": Entry("kvtool.cli.size", ANALYSE, "How many bytes does the KV cache take?"),
    "plan": Entry(
        "kvtool.cli.plan",
        ANALYSE,
        "What fits, how many users, how long a context, how fast, at what cost?",
    ),
    "check": Entry("kvtool.cli.check", ANALYSE, "Is that what really gets allocated?"),
    "fragment": Entry(
        "kvtool.cli.fragment",
        ANALYSE,
        "How much of the pool is wasted, by which allocator?",
    ),
    "prefix": Entry(
        "kvtool.cli.prefix",
        ANALYSE,
        "How much of the prompts can be shared, by which index?",
    ),
    "simulate": Entry(
        "kvtool.cli.simulate", ANALYSE, "What does the scheduler make of requests over time?"
    ),
    "bench": Entry(
        "kvtool.cli.bench",
        MEASURE,
        "What does paging cost here, on this GPU or CPU?",
        ("attention", "decode"),
    ),
    "presets": Entry(
        "kvtool.cli.presets",
        ANALYSE,
        "What is known: models, GPUs, workloads, shared prefixes and claims, each with its source.",
    ),
}
"""In the order of the help. The module has a function of the command's name, or, with commands of its
own, an `app`."""


class LazyCommand(TyperCommand):
    """A command's line in the help; the module behind it is imported by `load`."""

    def __init__(self, name: str, entry: Entry) -> None:
        super().__init__(name, help=entry.summary, rich_help_panel=entry.panel)
        self.entry = entry

    def load(self) -> Any:
        """The real command, made from the function of the same name in its module, or its group."""
        module = importlib.import_module(self.entry.module)
        assert self.name is not None
        if hasattr(module, "app"):
            return typer.main.get_command(module.app)
        single = typer.Typer(add_completion=False)
        single.command(
            self.name,
            cls=PlainCommand,
            epilog=getattr(module, "EPILOG", None),
            rich_help_panel=self.entry.panel,
        )(getattr(module, self.name.replace("-", "_")))
        return typer.main.get_command(single)


class LazyGroup(TyperGroup):
    """Lists every command without importing one, and imports the one that is called."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, entry in COMMANDS.items():
            self.add_command(LazyCommand(name, entry))

    def get_params(self, ctx: Any) -> list[Any]:
        """The options of kvtool itself, flags without a type to show."""
        return without_flag_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command by its name, or say which name is near."""
        name, rest = args[0], args[1:]
        command = self.get_command(ctx, name)
        if command is None and ctx.resilient_parsing:
            return None, None, rest
        if command is None:
            raise usage_error(
                f"no such command: {name}",
                f"kvtool --help lists the commands.{did_you_mean(name, self.commands)}",
            )
        return name, command.load() if isinstance(command, LazyCommand) else command, rest


app = typer.Typer(
    name="kvtool",
    cls=LazyGroup,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The KV cache of a language model: sized, and checked against the real one.",
)


def _print_version(asked: bool) -> None:
    if asked:
        Output().data(f"kvtool {__version__}\n")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Options of kvtool itself."""


def main() -> NoReturn:
    """Run the command line and end the process with its exit code."""
    # What is imported stays: to look through it for garbage every 700 objects costs a tenth of a run.
    gc.set_threshold(1_000_000, 20, 20)
    end_like_interrupts()
    code = run(sys.argv[1:])
    gc.freeze()  # nor is it looked through once more before the memory is given back
    sys.exit(code)


def end_like_interrupts() -> None:
    """A job that is ended by its scheduler or terminal keeps what it has made, as with Ctrl-C."""
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) == signal.SIG_DFL:  # nohup ignores it
            signal.signal(number, signal.default_int_handler)


def run(argv: Sequence[str]) -> int:
    """The edge: every outcome becomes an exit code, every error two lines on stderr."""
    try:
        code = _invoke(list(argv))
        Output().data("")  # what is still in the buffer must not fail after this edge
        return code
    except KvtoolError as error:
        return _report(error, argv)
    except typer.TyperException as error:
        return _report(_from_typer(error, argv), argv)
    except (KeyboardInterrupt, typer.Abort):
        return _report(_interrupted(), argv)
    except OSError as error:
        return _report(write_error(error) if error.errno in DISK_FULL else _internal(error), argv)
    except Exception as error:  # noqa: BLE001 - the edge: no traceback unless asked for
        return _report(_internal(error), argv)


def _invoke(argv: list[str]) -> int:
    command = typer.main.get_command(app)
    if not argv and COMPLETE_VARIABLE not in os.environ:
        # Help that nobody asked for is no data: like any usage error it goes to stderr.
        with contextlib.redirect_stdout(sys.stderr):
            command.main(["--help"], prog_name="kvtool", standalone_mode=False)
        return USAGE
    try:
        result = command.main(argv, prog_name="kvtool", standalone_mode=False)
    except SystemExit as end:  # shell completion and --install-completion end this way
        gone = isinstance(end.__context__, OSError)  # so does help whose reader went away
        result = 0 if gone else end.code
    if result == INTERRUPTED:  # what typer makes of a KeyboardInterrupt
        raise _interrupted()
    return result if isinstance(result, int) else 0


def _report(error: KvtoolError, argv: Sequence[str]) -> int:
    if os.environ.get(DEBUG_VARIABLE) == "1":
        traceback.print_exception(error)
    output = Output(format="json" if wants_json(argv) else "table")
    output.error(error, command=_command_in(argv))
    return error.exit_code


def _command_in(argv: Sequence[str]) -> str:
    """'size', or 'bench attention' where the command has commands of its own."""
    for place, word in enumerate(argv):
        if word in COMMANDS:
            inner = argv[place + 1 : place + 2]
            return " ".join([word, *(one for one in inner if one in COMMANDS[word].inner)])
    return ""


def _interrupted() -> KvtoolError:
    return KvtoolError(
        "interrupted",
        "nothing was written; run the same command again",
        code="interrupted",
        exit_code=INTERRUPTED,
    )


def _internal(error: Exception) -> KvtoolError:
    result = KvtoolError(
        f"internal: {type(error).__name__}: {error}",
        f"run again with {DEBUG_VARIABLE}=1 for the traceback and report it",
        code="internal",
    )
    result.__cause__ = error
    return result


def _from_typer(error: typer.TyperException, argv: Sequence[str]) -> KvtoolError:
    """Typer's usage errors in two lines: the message, and the nearest names or the help."""
    from kvtool.cli.foreign_words import ours  # no command that succeeds needs it

    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else f"kvtool {_command_in(argv)}".rstrip()
    near: Sequence[str] = getattr(error, "possibilities", None) or ()
    text = error.message if near or not error.format_message() else error.format_message()
    text = text.rstrip(".").replace("Invalid value for ", "")
    hint = f"did you mean {' or '.join(near)}?" if near else f"see {path} --help"
    if context is not None and (name := ours(error, context.command.params)):
        hint = f"it is called {name} here"
    code = "usage" if error.exit_code == USAGE else "failed"
    return KvtoolError(text[:1].lower() + text[1:], hint, code=code, exit_code=error.exit_code)
