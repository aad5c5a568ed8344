"""Requests for the plain scheduler of kvtool.sim.blocks: each block is named by its tokens, spelled out."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from kvtool.contents import Contents
from kvtool.requests import Requests
from kvtool.sim.blocks.request import Request
from kvtool.sim.settings import EOS, Settings

Token = tuple[int, int]
Key = Callable[[int], Hashable]


def plain_requests(
    requests: Requests, settings: Settings, contents: Contents | None = None
) -> list[Request]:
    """The requests by index; without contents no two blocks are the same."""
    count = len(requests)
    columns = {name: column.tolist() for name, column in requests.columns().items()}
    columns = {"priority": [0] * count, "parent": [-1] * count, "think_ns": [0] * count} | columns
    outputs = columns["output_tokens"]
    if settings.finish_by == EOS:
        outputs = (settings.max_model_len - requests.prompt_tokens).tolist()
    known: dict[Any, int] = {}
    made = []
    for index in range(count):
        key: Key = partial(_own_name, index)
        token = None
        if contents is not None:
            token = tokens_of(contents, index)
            key = _keys(token, settings.block_size, known)
        one = {name: column[index] for name, column in columns.items()}
        made.append(Request(index=index, most_output=outputs[index], key=key, token=token, **one))
    return made


def _own_name(index: int, block: int) -> Hashable:
    return index, block


def tokens_of(contents: Contents, index: int) -> Callable[[int], Token]:
    """Token by token what a request consists of, and what it goes on with."""
    tokens: list[Token] = []
    for piece in range(int(contents.starts[index]), int(contents.starts[index + 1])):
        value, offset = int(contents.value[piece]), int(contents.offset[piece])
        tokens += [(value, offset + k) for k in range(int(contents.length[piece]))]
    value, offset = int(contents.out_value[index]), int(contents.out_offset[index])
    return lambda k: tokens[k] if k < len(tokens) else (value, offset + k - len(tokens))


def _keys(token: Callable[[int], Token], size: int, known: dict[Any, int]) -> Key:
    """Names of a request's blocks: numbers of pairs (the name before, the tokens)."""
    names: list[int] = []

    def key(block: int) -> Hashable:
        while len(names) <= block:
            first = len(names) * size
            of = tuple(token(k) for k in range(first, first + size))
            before = names[-1] if names else None
            names.append(known.setdefault((before, of), len(known)))
        return names[block]

    return key
