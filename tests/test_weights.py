"""Parameters counted from configs against the classes of transformers, built on the meta device."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from weights_cases import CASES

from kvtool import catalog
from kvtool.model import read_model
from kvtool.weights.counting import parts_of
from kvtool.weights.parts import total
from kvtool.weights.published import PUBLISHED
from kvtool.weights.table import RECIPES, TOWERS

TYPES = catalog.class_defaults()["types"]


def built(config: dict[str, Any]) -> Any:
    """The class of transformers, without memory."""
    pytest.importorskip("transformers")
    from kvtool import live

    kind = config["model_type"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        own = {k: v for k, v in config.items() if k != "model_type"}
        made = live.config_class(kind)(**own)
        if kind == "dbrx":  # its attention reads what its config class does not keep
            made.attn_config.rope_theta = 10_000.0
        return live.build(made, device="meta")


def is_table(module: Any) -> bool:
    """An embedding of any class: its rows are looked up."""
    return type(module).__name__.endswith("Embedding") and hasattr(module, "weight")


BESIDE = ("bias", ".A_log", ".D")
"""Parameters of two dimensions that multiply no token as a matrix, by the end of their names."""
STACKED = ("x_proj_weight", "dt_proj_weight", "_gate_weight")
"""Matrices a head, of three dimensions."""


def multiplies(name: str, one: Any) -> bool:
    """A matrix that tokens are multiplied by: not a norm over all heads."""
    normalises = "norm" in name.rpartition(".")[0].rpartition(".")[2]
    stacked = ".experts." in name or name.endswith(STACKED)
    looked_up = "positional_embedding" in name  # a table without a module of its own
    beside = name.endswith(BESIDE) or normalises or looked_up
    return (one.ndim == 2 or stacked) and not beside


def unused(model: Any) -> int:
    """Half of the weights of LongCat-Flash's zero experts, which its class allocates: they compute
    nothing, and checkpoints have none."""
    stacks = [one for one in model.modules() if type(one).__name__ == "LongcatFlashExperts"]
    return sum(one.gate_up_proj[one.num_routed_experts :].numel() for one in stacks)


def test_every_recipe_is_compared() -> None:
    nested = {config["text_config"]["model_type"] for rows in CASES.values() for config in rows
              if "text_config" in config}  # fmt: skip
    assert set(RECIPES) - set(PUBLISHED) <= set(CASES) | nested
    assert set(TOWERS) <= set(CASES)


@pytest.mark.parametrize("kind", CASES)
def test_parameters_are_those_of_the_class_in_transformers(kind: str) -> None:
    for more in CASES[kind]:
        config = {"model_type": kind, **more}
        model = built(config)
        parts = parts_of("m", config, read_model(config, TYPES))
        named = dict(model.named_parameters())
        head = model.get_output_embeddings()
        extra = unused(model)
        if head is None:  # the text part of a composite, whose class has the head
            extra -= sum(part.size.count for part in parts if part.role == "head")
        assert total(parts).count == sum(one.numel() for one in named.values()) - extra, more
        # Experts are stacked, or there is a module for each.
        routed = sum(one.numel() for name, one in named.items() if ".experts." in name)
        counted = sum(part.size.count for part in parts if part.role == "experts")
        assert counted == routed - unused(model), more
        tables = {id(one.weight) for one in model.modules() if is_table(one)}
        matrices = sum(
            one.numel()
            for name, one in named.items()
            if id(one) not in tables and multiplies(name, one)
        )
        counted = sum(part.size.matrices for part in parts)
        tied = head.weight.numel() if head is not None and id(head.weight) in tables else 0
        assert counted == matrices - extra + tied, more
