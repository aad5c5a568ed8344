"""The committed class defaults are those of the pinned transformers, and the runtime has them all."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvtool.errors import KvtoolError
from kvtool.model import read_model
from kvtool.model.families import FAMILIES

ROOT = Path(__file__).parents[1]


def test_the_table_is_what_the_script_makes() -> None:
    pytest.importorskip("transformers")
    script = ROOT / "scripts/class_defaults.py"
    ran = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_every_generating_type_is_sized_from_its_defaults_or_refused_with_a_reason(
    table: dict[str, Any],
) -> None:
    refused = {}
    for name, row in table.items():
        if not row.get("generates"):
            continue
        try:
            shape = read_model({"model_type": name}, table)
        except KvtoolError as error:
            refused[name] = error.message
            continue
        assert shape.layers, name
    assert all(name in message for name, message in refused.items())
    encoders = {name for name, message in refused.items() if "is an encoder" in message}
    # May only shrink: types that generate and that kvtool does not size.
    assert set(refused) - encoders <= {
        "blt", "gemma4_assistant", "gemma4_unified_assistant", "pi0", "muse_glimmer_assistant",
    }  # fmt: skip


def test_every_family_is_a_type_of_transformers_or_says_what_it_is_like(
    table: dict[str, Any],
) -> None:
    strangers = {name for name, family in FAMILIES.items() if name not in table and not family.like}
    assert strangers == set()
    assert all(family.like in table for family in FAMILIES.values() if family.like)
