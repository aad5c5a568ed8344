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
        return live.build(live.config_class(kind)(**own), device="meta")


def is_table(module: Any) -> bool:
    """An embedding of any class: its rows are looked up."""
    return type(module).__name__.endswith("Embedding") and hasattr(module, "weight")


def test_every_recipe_is_compared() -> None:
    nested = {config["text_config"]["model_type"] for rows in CASES.values() for config in rows
              if "text_config" in config}  # fmt: skip
    assert set(RECIPES) <= set(CASES) | nested
    assert set(TOWERS) <= set(CASES)


@pytest.mark.parametrize("kind", CASES)
def test_parameters_are_those_of_the_class_in_transformers(kind: str) -> None:
    for more in CASES[kind]:
        config = {"model_type": kind, **more}
        model = built(config)
        parts = parts_of("m", config, read_model(config, TYPES))
        named = dict(model.named_parameters())
        assert total(parts).count == sum(one.numel() for one in named.values()), more
        # Experts are stacked, or there is a module for each.
        routed = sum(one.numel() for name, one in named.items() if ".experts." in name)
        assert sum(part.size.count for part in parts if part.role == "experts") == routed, more
        tables = {id(one.weight) for one in model.modules() if is_table(one)}
        matrices = sum(
            one.numel()
            for name, one in named.items()
            if id(one) not in tables
            and (one.ndim == 2 or ".experts." in name)
            and not name.endswith("bias")
            and "positional_embedding" not in name  # a table without a module of its own
        )
        head = model.get_output_embeddings().weight
        counted = sum(part.size.matrices for part in parts)
        assert counted == matrices + head.numel() * (id(head) in tables), more
