"""Scores and pattern from queries and keys: the one place where they are recomputed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def reads_ahead(config: Any) -> str | None:
    """Why scores and pattern cannot be recomputed for a model, or ``None`` where they can."""
    for field, causal in (("is_causal", True), ("use_bidirectional_attention", False)):
        given = getattr(config, field, None)
        if given is not None and bool(given) is not causal:
            return (
                f"with {field}={given!r} in the config a position may attend to later ones, and "
                f"what is recomputed here is a causal pattern; read attention_head_outputs"
            )
    return None


def scores(
    queries: Tensor,
    keys: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    chunk: int | None = None,
    start: Tensor | int = 0,
    slopes: Sequence[float] | None = None,
) -> Tensor:
    """What enters the softmax, ``[batch, heads, query, key]``; masked entries are ``-inf``.

    Args:
        queries: ``[batch, heads, query, qk_head_dim]``, rotary applied.
        keys: ``[batch, kv_heads, key, qk_head_dim]``; the last query is the last key's token.
        scale: factor on the dot products.
        softcap: ``c`` of ``c * tanh(scores / c)``, taken after the scale.
        window: how many positions a query sees, its own included.
        chunk: how long the chunks are of which a query sees its own alone.
        start: the position of the first key in the prompt, or each row's, ``[batch, 1, 1, 1]``.
        slopes: what each head adds for each position of the key (ALiBi).
    """
    groups = queries.shape[1] // keys.shape[1]
    found = queries @ keys.repeat_interleave(groups, dim=1).transpose(-1, -2) * scale
    if softcap is not None:
        found = torch.tanh(found / softcap) * softcap
    query, key = found.shape[-2:]
    if slopes is not None:
        slope = torch.tensor(slopes, dtype=found.dtype, device=found.device)
        found = found + slope.view(-1, 1, 1) * torch.arange(key, device=found.device)
    rows = torch.arange(key - query, key, device=found.device).unsqueeze(1)
    columns = torch.arange(key, device=found.device)
    hidden = columns > rows
    if window is not None:
        hidden = hidden | (columns <= rows - window)
    if chunk is not None:
        hidden = hidden | ((columns + start) // chunk != (rows + start) // chunk)
    return found.masked_fill(hidden, float("-inf"))


def pattern(scores: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Softmax over the keys in float32, in the scores' own dtype.

    Args:
        scores: ``[batch, heads, query, key]``.
        sinks: each head's score of no key, which takes its share of the row: ``[heads]``.
    """
    if sinks is not None:
        beside = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        return pattern(torch.cat([scores, beside], -1))[..., :-1]
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)
