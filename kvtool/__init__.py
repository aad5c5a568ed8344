"""kvtool: the KV cache of a language model, sized, and checked against the real one."""

__version__ = "0.1.0"
