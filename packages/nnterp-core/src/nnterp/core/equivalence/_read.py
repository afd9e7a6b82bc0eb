"""Reading a model's values, the same way on every engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from nnterp.core import VOCABULARY, Term
from nnterp.core.reading import can_be_read, copied, forward_order, saved, value_at

# What every decode step is told to choose its token by; finite in every dtype.
_SURE = 1e4

_BEFORE_BLOCKS = ("input_ids", "attention_mask", "input_size", "token_embeddings")


def chosen(keys: Sequence[str], values: str | Sequence[str]) -> list[str]:
    """The keys that ``values`` names.

    Args:
        keys: all there are.
        values: ``"all"``, or names (``"layer_output"``) and paths, with wildcards
            (``"layers.*.mlp.*"``).

    Raises:
        ValueError: a name is of no value.
    """
    if values == "all":
        return list(keys)
    wanted = [values] if isinstance(values, str) else list(values)
    found: set[str] = set()
    for pattern in wanted:
        matching = {
            key for key in keys if fnmatchcase(key, pattern) or key.rsplit(".", 1)[-1] == pattern
        }
        if not matching and pattern not in VOCABULARY:
            raise ValueError(f"{pattern!r} names no value; there are {', '.join(VOCABULARY)}")
        found |= matching
    return [key for key in keys if key in found]


def _guessed(key: str, layers: int, rank: Mapping[str, int]) -> tuple[int, int]:
    if key.startswith("layers."):
        _, layer, name = key.split(".", 2)
        return int(layer), rank[name]
    return (-1 if key in _BEFORE_BLOCKS else layers), rank[key]


def in_forward_order(
    model: Any, keys: Sequence[str], prompt: Sequence[int], guess: Sequence[str] = ()
) -> tuple[list[str], bool]:
    """The keys in the order in which this model can read them, and whether it measured that.

    Where the engine measures the order it is asked; else an order is tried, and searched for where
    it is not right.

    Args:
        model: the model.
        keys: served values.
        prompt: a prompt to try with.
        guess: an order that may well be right, another engine's.
    """
    try:
        own = {key: model.rank(key) for key in keys if not key.startswith("layers.")}
        blocks = [model.order(i) for i in range(model.num_layers)]
    except NotImplementedError:
        return _searched(model, keys, prompt, guess), False

    def rank(key: str) -> tuple[int, int]:
        if not key.startswith("layers."):
            place: tuple[int, int] = own[key]
            return place
        _, layer, name = key.split(".", 2)
        return int(layer), blocks[int(layer)][name]

    return sorted(keys, key=rank), True


def _searched(
    model: Any, keys: Sequence[str], prompt: Sequence[int], guess: Sequence[str]
) -> list[str]:
    def in_order(keys: Sequence[str]) -> bool:
        return can_be_read(model, prompt, keys)

    def like(block: Sequence[str]) -> list[str]:
        """The keys, those of every block in the order of one's."""
        terms = VOCABULARY.values()
        names = (*block, *(key for keys in map(Term.keys, terms) for key in keys))
        rank = {name: i for i, name in reversed(list(enumerate(names)))}
        return sorted(keys, key=lambda key: _guessed(key, model.num_layers, rank))

    places = {key: i for i, key in enumerate(guess)}
    first = like(()) if not guess else sorted(keys, key=lambda key: places.get(key, len(places)))
    if in_order(first):
        return first
    block = forward_order([key for key in first if key.startswith("layers.0.")], in_order)
    return forward_order(like([key.split(".", 2)[2] for key in block]), in_order)


def read(
    model: Any,
    prompts: Sequence[Sequence[int]],
    keys: Sequence[Sequence[str]],
    continuations: Sequence[Sequence[int]] | None,
) -> tuple[list[list[dict[str, Any]]], list[list[int]]]:
    """The values of some prompts, all in one trace, and of the decode steps that follow.

    The tokens of the decode steps are given, so that every model decodes the same ones; without
    them each is the likeliest that ends nothing.

    Args:
        model: the model.
        prompts: token ids.
        keys: for each step, what to read on it, in the order of the forward.
        continuations: for each prompt, the tokens that follow it.

    Returns:
        For each prompt and step the values by their keys, and for each prompt the tokens.
    """
    count = len(keys)
    ends = list(getattr(model, "end_tokens", ()))
    given = [None] * len(prompts) if continuations is None else continuations
    with model.decode(max_new_tokens=count) as tracer:
        for prompt, tokens in zip(prompts, given, strict=True):
            with tracer.invoke(prompt):
                rows = saved([])
                for step in tracer.iter[0:count]:
                    values = {}
                    for key in keys[step]:
                        values[key] = copied(value_at(model, key))
                    logits = model.logits
                    values["logits"] = copied(logits)
                    token = likeliest(logits, ends) if tokens is None else tokens[step]
                    model.logits = certain(logits, token)
                    rows.append((values, token))
    found = [rows] if len(prompts) == 1 else list(rows)
    return (
        [[dict(values) for values, _ in steps] for steps in found],
        [[int(token) for _, token in steps] for steps in found],
    )


def likeliest(logits: Tensor, ends: Sequence[int]) -> int:
    """The likeliest token of the last position that is not in ``ends``; ``[1, seq, vocab]``."""
    last = logits[0, -1].detach().clone()
    last[list(ends)] = -torch.inf
    return int(last.argmax())


def certain(logits: Tensor, token: int) -> Tensor:
    """Logits of this shape, ``[1, seq, vocab]``, by which ``token`` is chosen."""
    sure = torch.zeros_like(logits)
    sure[:, -1, token] = _SURE
    return sure
