"""kvtool: the KV cache of a language model, sized, simulated and measured."""

__version__ = "0.1.0"
