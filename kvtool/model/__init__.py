"""raw config.json → ModelShape: for each layer its kind and sizes, and which key decided them."""

from kvtool.model.read import read_model
from kvtool.model.shape import LayerCache, ModelShape, State

__all__ = ["LayerCache", "ModelShape", "State", "read_model"]
