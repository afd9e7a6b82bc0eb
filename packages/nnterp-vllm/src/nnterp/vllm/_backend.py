"""transformers' classes, given back after vLLM's Transformers backend has built its model.

The backend decorates the decoder's own class for torch.compile: from then on it asks for a
vLLM config wherever it is built, so that transformers cannot build it in the same process.
An engine without compilation does not use the decoration.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch._dynamo.convert_frame import _bytecode_hooks
from vllm.compilation.decorators import IGNORE_COMPILE_KEY
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper


def release_classes() -> None:
    """Undo the decoration of every class of transformers'."""
    for decorated in list(TorchCompileWithNoGuardsWrapper.__subclasses__()):
        cls: Any = decorated
        if not cls.__module__.startswith("transformers."):
            continue
        original = inspect.getclosurevars(cls.__init__).nonlocals.get("old_init")
        if original is None:
            continue
        # Whatever is compiled later in this process passes these hooks.
        for key, hook in list(_bytecode_hooks.items()):
            if isinstance(getattr(hook, "__self__", None), cls):
                del _bytecode_hooks[key]
        cls.__init__ = original
        for name in ("__call__", "save_aot_compiled_function", IGNORE_COMPILE_KEY):
            if name in vars(cls):
                delattr(cls, name)
        cls.__bases__ = tuple(
            base for base in cls.__bases__ if base is not TorchCompileWithNoGuardsWrapper
        )
