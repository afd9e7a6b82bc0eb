"""Prompts as text: what the tokenizer is given, and which tokens hold a part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NO_TOKENIZER = (
    "the checkpoint has no tokenizer, so text cannot become token ids: pass a list of token ids, "
    "or load the model with tokenizer="
)

# How vocabularies write a space: byte-level ones, and SentencePiece's.
_SPACES = "\u0120\u2581"


def is_chat(prompt: Any) -> bool:
    """Whether ``prompt`` is a list of chat messages (dicts with a role)."""
    return (
        isinstance(prompt, (list, tuple))
        and len(prompt) > 0
        and all(isinstance(message, Mapping) and "role" in message for message in prompt)
    )


def tokenized(prompt: Any, tokenizer: Any, **options: Any) -> tuple[str, Any]:
    """A prompt's text and what ``tokenizer`` makes of it.

    A string has the special tokens that the tokenizer adds by default. Chat messages go through
    the chat template with its generation prompt, and have those that the template writes.

    Args:
        prompt: a string or chat messages.
        tokenizer: the model's tokenizer.
        **options: passed on to the tokenizer.
    """
    if isinstance(prompt, str):
        return prompt, tokenizer(prompt, **options)
    text: str = tokenizer.apply_chat_template(
        list(prompt), tokenize=False, add_generation_prompt=True
    )
    return text, tokenizer(text, add_special_tokens=False, **options)


def token_positions(
    model: Any, prompt: Any, substring: str, *, occurrence: int | None = None
) -> list[int]:
    """The positions of the tokens that hold a part of ``substring`` in ``prompt``.

    Positions are those of the prompt's own tokens, special ones included, as every value of a
    trace of this prompt has them: ``value[:, positions]``, ``model.steer(..., positions=...)``.
    They come from the tokenizer's offsets, so a token that reaches beyond the substring counts,
    and so does each of the tokens that share one character.

    Args:
        model: a model, or a tokenizer.
        prompt: a string, or chat messages, whose text is the chat template's.
        substring: what to look for, as it is written in the prompt.
        occurrence: which of its occurrences, from 0; negative ones count from the last. All of
            them by default. They do not overlap, as with ``str.count``.

    Returns:
        The positions, ascending, each once.

    Raises:
        ValueError: the substring is empty or not in the prompt, there is no such occurrence, no
            token holds it, or the tokenizer gives no offsets.
        TypeError: the prompt is no text.
    """
    tokenizer = model.tokenizer if hasattr(model, "tokenizer") else model
    if not isinstance(prompt, str) and not is_chat(prompt):
        raise TypeError(
            f"a substring is looked for in a string or in chat messages, not in a "
            f"{type(prompt).__name__}"
        )
    if tokenizer is None:
        raise ValueError(NO_TOKENIZER)
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{type(tokenizer).__name__} does not say which characters a token holds; use a "
            f"tokenizer with is_fast"
        )
    text, found = tokenized(
        prompt, tokenizer, return_offsets_mapping=True, return_special_tokens_mask=True
    )
    starts = _occurrences(text, substring)
    if occurrence is not None:
        if not -len(starts) <= occurrence < len(starts):
            raise ValueError(
                f"{substring!r} is {len(starts)} times in the prompt; there is no occurrence "
                f"{occurrence}"
            )
        starts = [starts[occurrence]]
    positions = [
        i
        for i, (first, end) in enumerate(_spans(text, found, tokenizer))
        if any(first < at + len(substring) and at < end for at in starts)
    ]
    if not positions:
        raise ValueError(f"no token of the prompt holds {substring!r}: the tokenizer drops it")
    return positions


def _spans(text: str, found: Any, tokenizer: Any) -> list[tuple[int, int]]:
    """The characters of each token: from one, to before another. None of one that is added."""
    tokens = tokenizer.convert_ids_to_tokens(found["input_ids"])
    spans: list[tuple[int, int]] = []
    last = 0
    for token, (first, end), added in zip(
        tokens, found["offset_mapping"], found["special_tokens_mask"], strict=True
    ):
        if added and first == end:
            spans.append((0, 0))
            continue
        # Tokenizers like GPT-2's leave the spaces that a token begins with out of its offsets.
        spaces = len(token) - len(token.lstrip(_SPACES))
        if first == end and spaces == len(token):
            first, end = last, last + spaces
        elif spaces and last < first and text[last:first].isspace():
            first = last
        spans.append((first, end))
        last = end
    return spans


def _occurrences(text: str, substring: str) -> list[int]:
    if not substring:
        raise ValueError("the substring is empty")
    starts: list[int] = []
    at = text.find(substring)
    while at >= 0:
        starts.append(at)
        at = text.find(substring, at + len(substring))
    if not starts:
        shown = text if len(text) <= 200 else f"{text[:200]}…"
        raise ValueError(f"{substring!r} is not in the prompt {shown!r}")
    return starts
