"""An option in an engine's words is answered with the name that it has here."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import typer.main
from ran import Ran

from kvtool.cli.foreign_words import OURS
from kvtool.cli.main import COMMANDS

Kvtool = Callable[..., Ran]


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("--max-model-len", "--context"),
        ("--tensor-parallel-size=8", "--tp"),
        ("--mem-fraction-static", "--gpu-memory-utilization"),
        ("--disable-hybrid-kv-cache-manager", "--no-hybrid"),
    ],
)
def test_an_engines_word_is_known(kvtool: Kvtool, typed: str, name: str) -> None:
    ran = kvtool("plan", "llama-3-8b", "--gpu", "h100", typed)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.splitlines()[-1] == f"Hint: it is called {name} here"


def test_an_option_that_a_command_lacks_is_not_named(kvtool: Kvtool) -> None:
    ran = kvtool("size", "llama-3-8b", "--mem-fraction-static", "0.8")
    assert "it is called" not in ran.err


def test_each_name_is_an_option_and_no_word_is_one_already() -> None:
    for command in ("plan", "simulate", "fragment"):
        known = options(command)
        words = [word for name, listed in OURS.items() if name in known for word in listed]
        assert len(words) == len(set(words)), "one name a command"
    assert set(OURS) <= options("plan") | options("fragment")
    assert not {word for listed in OURS.values() for word in listed} & options("plan")


def test_another_commands_name_is_its_own(kvtool: Kvtool) -> None:
    ran = kvtool("fragment", "--ctx-size", "4096")
    assert ran.err.splitlines()[-1] == "Hint: it is called --max-model-len here"


def options(command: str) -> set[str]:
    module = importlib.import_module(COMMANDS[command].module)
    app = typer.Typer()
    app.command()(getattr(module, command))
    params = typer.main.get_command(app).params
    return {name for one in params for name in (*one.opts, *one.secondary_opts)}
