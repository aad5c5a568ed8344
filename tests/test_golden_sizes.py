"""Sizes derived by hand, each with its derivation and source, against `kvtool size`."""

from __future__ import annotations

import ast
import json
import operator
from pathlib import Path
from typing import Any

import pytest

GOLDEN = json.loads((Path(__file__).parent / "golden/sizes.json").read_text())
ARITHMETIC = {ast.Add: operator.add, ast.Mult: operator.mul}


def value_of(node: ast.AST) -> int:
    """The value of a sum of products of whole numbers."""
    if isinstance(node, ast.Expression):
        return value_of(node.body)
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    assert isinstance(node, ast.BinOp)
    result: int = ARITHMETIC[type(node.op)](value_of(node.left), value_of(node.right))
    return result


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["model"])
def test_the_derivation_is_the_size(case: dict[str, Any], kvtool: Any) -> None:
    assert value_of(ast.parse(case["derivation"], mode="eval")) == case["bytes"]
    dtype = ["--dtype", case["dtype"]] if "dtype" in case else []
    ran = kvtool("size", case["model"], "-c", case["context"], "--allow-long", "--json", *dtype)
    assert ran.code == 0, ran.err
    assert ran.json["rows"][0]["total_bytes"] == case["bytes"]


def test_there_are_many_and_each_has_a_source() -> None:
    assert len(GOLDEN) >= 40
    assert all(case["source"] for case in GOLDEN)
