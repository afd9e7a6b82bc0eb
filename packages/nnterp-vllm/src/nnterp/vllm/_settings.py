"""What vLLM takes for granted of an architecture, whatever a checkpoint's config says."""

from __future__ import annotations

from typing import Any


def only(model: Any, **settings: Any) -> None:
    """Refuse a checkpoint with another setting than the one that vLLM computes with.

    Args:
        model: the model, or its text config where there is no model yet.
        **settings: fields of the text config or of its rotary settings, and what vLLM takes them
            for.

    Raises:
        ValueError: the checkpoint has another; the message names it.
    """
    config = getattr(model, "text_config", model)
    rotary = getattr(config, "rope_parameters", None) or {}
    for name, taken in settings.items():
        given = getattr(config, name, rotary.get(name, taken))
        if (given or None) != (taken or None):
            raise ValueError(
                f"this checkpoint has {name}={given!r}, and vLLM computes {config.model_type} "
                f"as if it were {taken!r}, so no value would be the checkpoint's own; load it "
                f"with engine='hf'"
            )
