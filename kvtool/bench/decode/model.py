"""A model that decodes, on a device: random weights from a seed, or those of its folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kvtool import live
from kvtool.bench.decode.blueprint import Blueprint, Heads
from kvtool.bench.decode.settings import ModelChoice
from kvtool.bench.device import TORCH_DTYPES, torch_dtype
from kvtool.errors import KvtoolError
from kvtool.guard import offline, quiet

Tensor = torch.Tensor

PROBE_TOKENS = 8
TIED_SCALE = 0.1
"""Of a random embedding table that is also the head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A model with weights. `module` is transformers' own class."""

    module: Any
    plan: Blueprint
    choice: ModelChoice
    weights: str
    """random or folder."""
    cache_name: str
    """What its forward calls the cache: `cache`, or `past_key_values` before transformers 5.20."""

    @property
    def device(self) -> str:
        """As torch names it."""
        return self.choice.device

    @property
    def dtype(self) -> torch.dtype:
        """Of weights and cache."""
        found: torch.dtype = torch_dtype(self.choice.dtype)
        return found

    @property
    def heads(self) -> Heads:
        """Heads and windows of its layers."""
        return self.plan.heads

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers."""
        return self.heads.token_bytes(self.dtype.itemsize)

    @property
    def weights_bytes(self) -> int:
        """All parameters, tied ones once."""
        return self.plan.num_parameters * self.dtype.itemsize


def build_model(plan: Blueprint, choice: ModelChoice) -> Decoder:
    """The model with its weights. Raises KvtoolError if the folder's do not fit the config.

    Random weights: normal, of variance 1 / columns, so that attention scores have a variance near
    1 and every token depends on every block that it should read; the same for a seed and a dtype.
    """
    real = plan.folder is not None and not choice.random_weights
    with quiet(), offline(), _seeded(choice):
        if real:
            module = _real(plan, choice)
        else:
            dtype = TORCH_DTYPES[choice.dtype]
            module = live.build(plan.config, device=choice.device, dtype=dtype, cls=plan.cls)
            _randomize(module, choice)
    module.requires_grad_(False)
    decoder = Decoder(
        module=module.eval(),
        plan=plan,
        choice=choice,
        weights="folder" if real else "random",
        cache_name=live.cache_argument(module),
    )
    check_finite(decoder)
    return decoder


@contextmanager
def _seeded(choice: ModelChoice) -> Iterator[None]:
    """The process's own random numbers are left as they were."""
    devices = [choice.device] if choice.device.startswith("cuda") else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(choice.seed)
        yield


def _randomize(module: Any, choice: ModelChoice) -> None:
    generator = torch.Generator(choice.device).manual_seed(choice.seed)
    head, table = module.get_output_embeddings().weight, module.get_input_embeddings().weight
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
        if head is table:  # else the token that was read is the likeliest next one, for ever
            table.mul_(TIED_SCALE)


def _real(plan: Blueprint, choice: ModelChoice) -> Any:
    """The folder's safetensors, whole: no code, no network, nothing made up for what is missing."""
    if plan.loaded.config.get("quantization_config"):
        raise _unfit(plan, "they are quantised, and would be read without their scales")
    try:
        module, told = plan.cls.from_pretrained(
            str(plan.folder),
            config=plan.config,
            dtype=torch_dtype(choice.dtype),
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told, and refused below
        )
    except Exception as error:
        why = " ".join(str(error).split())[:160]
        raise _unfit(plan, f"{type(error).__name__}: {why}") from error
    missing = sorted(told["missing_keys"]) + [str(one) for one in told.get("mismatched_keys", ())]
    if missing:
        raise _unfit(plan, f"{len(missing)} tensors are missing or of another shape ({missing[0]})")
    return module.to(choice.device)


def _unfit(plan: Blueprint, why: str) -> KvtoolError:
    return KvtoolError(
        f"the weights in {plan.folder} cannot be used: {why}",
        "--random-weights runs the config without them",
        code="not_runnable",
    )


def check_finite(decoder: Decoder) -> None:
    """Refuse a model whose logits are no numbers: all caches would generate the same nonsense."""
    ids = prompts(decoder, 1, min(PROBE_TOKENS, decoder.plan.max_context or PROBE_TOKENS))
    decoder.module.set_attn_implementation("sdpa")  # its config may have been run with ours before
    try:
        with quiet(), torch.no_grad():
            logits = decoder.module(input_ids=ids, use_cache=False).logits
    except (IndexError, ZeroDivisionError, TypeError, ValueError, KeyError) as error:
        why = f"its own code fails on {ids.shape[1]} tokens ({type(error).__name__})"
    else:
        if bool(torch.isfinite(logits).all()):
            return
        why = "its logits are no numbers"
    raise KvtoolError(
        f"{decoder.plan.name} cannot be run by bench decode: {why}",
        "look at its config and weights; --dtype fp32 has more room than fp16",
        code="not_runnable",
    )


def forward(decoder: Decoder, ids: Tensor, **given: Any) -> Tensor:
    """Greedy tokens [batch] after ids [batch, tokens], of the last position of each sequence."""
    with torch.no_grad():
        logits = decoder.module(input_ids=ids, logits_to_keep=1, **given).logits
    found: Tensor = logits[:, -1].argmax(-1)
    return found


def prompts(decoder: Decoder, batch: int, tokens: int, seed: int = 0) -> Tensor:
    """Random ids [batch, tokens], the same for a seed whatever the device."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, decoder.plan.vocab, (batch, tokens), generator=generator)
    return ids.to(decoder.device)
