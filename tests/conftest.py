"""What several test files need: the class defaults, and kvtool run in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from ran import Ran

from kvtool import catalog
from kvtool.cli.main import run


@pytest.fixture(scope="session")
def table() -> dict[str, Any]:
    """presets/class_defaults.json's types."""
    types: dict[str, Any] = catalog.class_defaults()["types"]
    return types


@pytest.fixture
def kvtool(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run `kvtool …` in this process and read its streams."""

    def call(*argv: str) -> Ran:
        capsys.readouterr()
        code = run([str(word) for word in argv])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return call
