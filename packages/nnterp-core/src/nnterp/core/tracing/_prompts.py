"""What a prompt may be, and its token ids: the same on every engine."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

from torch import Tensor

from .._text import NO_TOKENIZER, tokenized
from .._text import is_chat as is_chat

_EMPTY = "the prompt is empty: give at least one token"


def encode(prompt: Any, tokenizer: Any) -> list[int]:
    """The token ids of one prompt.

    Args:
        prompt: a string (special tokens are added as the tokenizer does by default), a list,
            array or tensor of token ids (taken as they are), a tokenizer's output (masked tokens
            are dropped), or chat messages (through the chat template, with its generation
            prompt and no second BOS).
        tokenizer: the model's tokenizer, or ``None`` where it has none.

    Raises:
        ValueError: the prompt is empty, holds several prompts, or is text and the checkpoint
            has no tokenizer.
        TypeError: it is none of these.
    """
    if isinstance(prompt, str) or is_chat(prompt):
        if tokenizer is None:
            raise ValueError(NO_TOKENIZER)
        ids = tokenized(prompt, tokenizer)[1]["input_ids"] if prompt else []
    elif isinstance(prompt, Mapping):
        if "input_ids" not in prompt:
            raise TypeError(f"a tokenizer's output has input_ids; this has {sorted(prompt)}")
        ids = _flat(prompt["input_ids"])
        mask = prompt.get("attention_mask")
        if mask is not None:
            ids = [token for token, own in zip(ids, _flat(mask), strict=True) if own]
    elif isinstance(prompt, (list, tuple, Tensor)) or hasattr(prompt, "__array__"):
        ids = _flat(prompt)
    else:
        raise TypeError(
            "a prompt is a string, token ids, a tokenizer's output or chat messages, "
            f"not {type(prompt).__name__}"
        )
    if not len(ids):
        raise ValueError(_EMPTY)
    return [int(token) for token in ids]


def _flat(ids: Any) -> list[Any]:
    if isinstance(ids, Tensor):
        if ids.is_floating_point():
            raise TypeError(f"token ids are integers, not {ids.dtype}")
        ids = ids.tolist()
    elif hasattr(ids, "__array__"):
        ids = ids.tolist()
    flat: list[Any] = list(ids) if isinstance(ids, (list, tuple)) else [ids]
    if flat and isinstance(flat[0], (list, tuple)):
        if len(flat) > 1:
            raise ValueError(
                f"one prompt at a time, not {len(flat)}: use one tracer.invoke(...) for each"
            )
        flat = list(flat[0])
    if any(isinstance(token, bool) or not isinstance(token, Integral) for token in flat):
        raise TypeError("token ids are integers; for several prompts use one invoke for each")
    return flat
