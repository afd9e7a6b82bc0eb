"""``StandardizedVLLM``: nnsight's VLLM engine renamed to the standard vocabulary."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any, ClassVar
from unittest import mock
from weakref import WeakSet

import torch
import vllm
from nnsight.modeling.vllm.async_backend import AsyncVLLMBackend
from nnsight.modeling.vllm.engines.engine import acollect, attach
from nnsight.modeling.vllm.envoys import parallel_envoys
from nnsight.modeling.vllm.registration import RegisteringTracer
from nnsight.modeling.vllm.tracer import VLLMTracer
from nnsight.modeling.vllm.vllm import VLLM
from nnsight.tracing.tracer import mark
from torch import Tensor
from torch.nn import Module
from vllm.platforms import current_platform
from vllm.v1.engine.exceptions import EngineDeadError

from nnterp.core import VOCABULARY, OutsideTrace, Unavailable
from nnterp.core import _layouts as layouts
from nnterp.core.protocols import StandardModel
from nnterp.core.reading import host_of
from nnterp.core.tracing import (
    Argument,
    Batched,
    Derived,
    First,
    Lens,
    Site,
    Standardized,
    checked_length,
    checked_path,
    container_envoys,
    has_tokenizer,
    model_type_of,
    own,
    quantised_by,
    running,
    unavailable,
    under,
    value,
)

from . import _faults, _runner, _versions
from ._backend import release_classes
from ._conventions import BackendLayer
from ._travel import travelling

# What is set in the environment for an engine's processes; later engines are not bound by it.
_START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_SWITCHES = ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_USE_BREAKABLE_CUDAGRAPH", _START_METHOD)

# What the engine cannot do beside blocks that read and edit, and why.
_REFUSED: dict[str, str] = {
    "enable_chunked_prefill": "a block would see its prompt in pieces",
    "enable_prefix_caching": "a plain request would read the cache that an edited one wrote",
    "speculative_config": "a draft's tokens pass the model beside the request's own",
    "async_scheduling": "a step that is scheduled ahead is run past an end token, and seen",
    "quantization": "no value was measured on quantised weights in vLLM; load plain ones",
}


_PACKING = (
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
    # Before 0.28.
    "vllm.model_executor.layers.fused_moe.cpu_fused_moe",
)
"""Where vLLM's CPU kernels pack the weights of experts."""

_ONE_ADAPTER = "vLLM's CPU kernels apply one request's adapter to every request of a step"


def _close_at_exit(reference: weakref.ref[StandardizedVLLM]) -> None:
    model = reference()
    if model is not None:
        with contextlib.suppress(Exception):
            model.close()


_TO_REST = 0.2
"""Seconds, many times what an engine core takes from its last reply to its wait for a request."""

_PATIENCE = 10.0
"""Seconds that an aborted request waits for the engine to let it go."""


class SettingsTracer(VLLMTracer):
    """A tracer whose sampling settings every invoke takes unless it names its own."""

    settings: ClassVar[dict[str, Any]] = {}

    def invoke(self, *args: Any, **kwargs: Any) -> Any:
        return super().invoke(*args, **{**self.settings, **kwargs})


class StreamBackend(AsyncVLLMBackend):
    """The stream of an asynchronous engine's outputs; a block's error keeps its type."""

    filename: str | None = None

    def __call__(self, tracer: Any) -> None:
        if self.model.closed:
            raise RuntimeError(_CLOSED)
        self.filename = tracer.info.code.co_filename
        super().__call__(tracer)

    async def __aiter__(self) -> AsyncIterator[Any]:
        outputs = super().__aiter__()
        try:
            async for output in outputs:
                yield output
        finally:
            # A stream left early ends its request now, not when it is garbage.
            await outputs.aclose()

    async def _free_worker(self) -> None:
        # An engine that was closed, or is on its way, gives no answer.
        with contextlib.suppress(EngineDeadError, TimeoutError):
            async with asyncio.timeout(_PATIENCE):
                # The engine lets go of the request before its worker does, or a step may want it.
                await self._generator.aclose()
                if not self.model.closed:
                    await super()._free_worker()

    async def _attach_saves(self, output: Any) -> None:
        entry = await acollect(self.model.vllm_entrypoint, self._request_id, output)
        if entry is not None:
            attach(output, entry)
            if entry["error"]:
                self.model._raise_here(entry["error"], self.filename)


class InstallingTracer(RegisteringTracer):
    """A tracer of a block that stays on the engine; its errors name the file it is in."""

    def execute(self, code: Any) -> None:
        assert self.registration is not None
        self._model.__dict__["_installed_in"][self.registration.id] = code.co_filename
        with travelling({str(self.info.frame.f_globals["__name__"])}):
            super().execute(code)


class StandardizedVLLM(Standardized, VLLM, StandardModel):
    """A causal language model on the vLLM engine whose modules answer to the standard names.

    The vocabulary, layouts and methods are those of ``StandardizedTransformer``. A trace is a
    generation request with vLLM's defaults; the block runs in the engine's worker, one prompt
    for each invoke. So every value's batch axis is 1 and holds this step's tokens: the whole
    prompt on the prefill, one token on each decode step. Values are private copies.

    Args:
        repo_id: a model's name on the hub, or a folder with a checkpoint.
        family: the family to use instead of the one looked up: a module or any object with
            ``RENAME`` and ``ENVOYS`` written against vLLM's module classes (and any size
            function or ``project_on_vocab``). The config is not read for it.
        rename: extra aliases, merged over the family's; a key given here wins.
        envoys: extra ``envoys=`` entries, merged over the family's and nnsight's for vLLM's
            parallel layers; a key given here wins.
        block_timeout: seconds that a block may run without asking the model for a value; one
            that runs longer gets ``TimeoutError``, and the engine goes on.
        **kwargs: passed on to nnsight's ``VLLM`` (``dispatch``, ``mode``, ``taps``) and to
            vLLM's engine.

    Attributes:
        family: the vLLM family the checkpoint resolved to, or the one passed.
        verified: whether this vLLM release was measured on this kind of machine.

    Raises:
        UnsupportedFamily: no family is passed and vLLM's implementation of the checkpoint's
            model type has none under ``nnterp.families.vllm``.
        FileNotFoundError: ``repo_id`` is a path at which nothing is.
        ValueError: an engine option that would make values wrong, with the reason.
    """

    engine = "vllm"
    vllm_entrypoint: Any
    taps: tuple[str, ...]
    _in_process: ClassVar[WeakSet[StandardizedVLLM]] = WeakSet()

    def __init__(
        self,
        repo_id: str | os.PathLike[str] | Module,
        *args: Any,
        family: Any = None,
        rename: dict[Any, Any] | None = None,
        envoys: dict[Any, Any] | None = None,
        block_timeout: float = 60.0,
        **kwargs: Any,
    ) -> None:
        self.closed = False
        self.__dict__["_installed_in"] = {}
        self.verified = _versions.check(vllm.__version__, current_platform.is_cpu())
        if isinstance(repo_id, os.PathLike):
            repo_id = os.fspath(repo_id)
        if isinstance(repo_id, str):
            checked_path(repo_id)
            self._refuse(kwargs)

        def checkpoint_config() -> Any:
            from vllm.transformers_utils.config import get_config

            return get_config(
                repo_id,
                trust_remote_code=kwargs.get("trust_remote_code", False),
                revision=kwargs.get("revision"),
            )

        def model_type() -> str:
            config = checkpoint_config()
            # Before the weights are loaded.
            self._refuse_quantised(config)
            self._refuse_long(config.get_text_config(), kwargs.get("max_model_len"))
            return model_type_of(config)

        self.family = self._family(family, model_type, self.engine)
        if isinstance(repo_id, str):
            kwargs = self._engine_defaults(repo_id, kwargs)
            if (settings := getattr(self.family, "settings", None)) is not None:
                for name, own in settings(checkpoint_config().get_text_config()).items():
                    kwargs[name] = {**own, **(kwargs.get(name) or {})}
            # The worker builds the same tree, from the same description.
            kwargs["additional_config"] = {
                **(kwargs.get("additional_config") or {}),
                _runner.CONFIG_KEY: _runner.packed(
                    {
                        "family": self.family,
                        "rename": rename,
                        "envoys": envoys,
                        "block_timeout": block_timeout,
                    }
                ),
            }
            # An engine is started for nothing that is refused.
            dispatch = kwargs.pop("dispatch", False)
        self.__dict__["_WORKER_CLS"] = _runner.worker_path()
        self.__dict__["_tensor_parallel"] = kwargs.get("tensor_parallel_size") or 1
        super().__init__(
            repo_id,
            *args,
            rename={**self.family.RENAME, **(rename or {})},
            envoys={
                **parallel_envoys(),
                **container_envoys(),
                **self.family.ENVOYS,
                **(envoys or {}),
            },
            **kwargs,
        )
        try:
            self._refuse_quantised(self.config)
            _ = self.architecture  # which may know the variant for one that nothing describes
            if family is None:
                self._check_blocks()
            if (check := getattr(self.family, "check", None)) is not None:
                check(self)
            if isinstance(repo_id, str) and dispatch:
                self.dispatch()
        except BaseException:
            self.close()
            raise
        # What a block mentions of the tree goes to the worker as these names.
        for envoy in (self, *self.modules()):
            envoy.__dict__["_persistent_id"] = f"Envoy:{envoy.path}"

    # -- construction ----------------------------------------------------------

    @staticmethod
    def _refuse(kwargs: dict[str, Any]) -> None:
        problems = [
            f"{name}={kwargs[name]!r}: {reason}"
            for name, reason in _REFUSED.items()
            if kwargs.get(name)
        ]
        if kwargs.get("kv_cache_dtype", "auto") not in ("auto", kwargs.get("dtype")):
            problems.append(
                f"kv_cache_dtype={kwargs['kv_cache_dtype']!r}: the attention would work with keys "
                f"and values rounded after they were served"
            )
        if (
            kwargs.get("enable_lora")
            and kwargs.get("mode") == "async"
            and current_platform.is_cpu()
        ):
            problems.append(
                f"enable_lora with mode='async' on the CPU: {_ONE_ADAPTER}, and traces share steps"
            )
        if (
            kwargs.get("enable_lora")
            and str(kwargs.get("dtype")) in ("float32", "float", "torch.float32")
            and not current_platform.is_cpu()
        ):
            # vllm/lora/ops/triton_ops/lora_shrink_op.py; its assertion would end the engine.
            problems.append(
                "enable_lora with dtype='float32' on a GPU: vLLM's kernels for adapters take "
                "float16 and bfloat16"
            )
        if kwargs.get("pipeline_parallel_size", 1) > 1:
            problems.append(
                "pipeline_parallel_size > 1: a block's values would be spread over engines"
            )
        if kwargs.get("taps") and current_platform.is_cpu():
            problems.append(
                "taps: there are no CUDA graphs on the CPU; every value is served there"
            )
        elif kwargs.get("taps") and os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            # Measured on 0.26: every value off by its own size, nnsight's alike, and no error.
            problems.append(
                "taps in process: vLLM was imported without them, so its graphs would replay the "
                "attention of their recording; unset VLLM_ENABLE_V1_MULTIPROCESSING"
            )
        if kwargs.get("enforce_eager") is False and not kwargs.get("taps"):
            problems.append(
                "enforce_eager=False without taps: no block runs inside a captured graph"
            )
        if problems:
            raise ValueError("StandardizedVLLM refuses " + "; ".join(problems))

    @staticmethod
    def _refuse_quantised(config: Any) -> None:
        if (method := quantised_by(config)) is not None:
            raise ValueError(
                f"the checkpoint's weights are quantised by {method!r}: no value was measured on "
                f"quantised weights in vLLM; load a checkpoint with plain ones"
            )

    @staticmethod
    def _refuse_long(config: Any, length: int | None) -> None:
        rotary = getattr(config, "rope_parameters", None) or {}
        if rotary.get("rope_type") != "longrope":
            return
        length = length or config.max_position_embeddings
        short = rotary.get("original_max_position_embeddings", length)
        if length > short:
            raise ValueError(
                f"with longrope and max_model_len above {short} vLLM turns by the long factors "
                f"whatever a prompt's length is, and transformers does not; load it with "
                f"max_model_len={short}"
            )

    @staticmethod
    def _engine_defaults(repo_id: str, kwargs: dict[str, Any]) -> dict[str, Any]:
        kwargs = dict(kwargs)
        if not has_tokenizer(kwargs.get("tokenizer") or repo_id):
            kwargs.setdefault("skip_tokenizer_init", True)
        # vLLM's own choice on a GPU.
        kwargs.setdefault("async_scheduling", False)
        if not current_platform.is_cpu():
            return kwargs
        if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
            # vLLM would take nine tenths of the machine's memory for the cache.
            kwargs.setdefault("kv_cache_memory_bytes", 2**30)
        compilation = kwargs.setdefault("compilation_config", {})
        if isinstance(compilation, dict):
            # Its rotary kernel is wrong for queries with a head axis of their own.
            operations = list(compilation.get("custom_ops", ()))
            kwargs["compilation_config"] = {
                **compilation,
                "custom_ops": [*operations, "-rotary_embedding"],
            }
        return kwargs

    @staticmethod
    @contextlib.contextmanager
    def _meta_device() -> Iterator[None]:
        """Build the tree on a machine without an accelerator, where vLLM asks for one."""
        if torch.cuda.is_available():
            yield
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch("torch.cuda.get_device_capability", return_value=(8, 0)))
            stack.enter_context(mock.patch("torch.accelerator.empty_cache", return_value=None))
            # The CPU kernels' packed form of the experts' weights has no meta implementation.
            unpacked = mock.Mock(side_effect=lambda weight, isa: weight)
            for module in _PACKING:
                if find_spec(module) is not None:
                    name = f"{module}.cpu_prepack_moe_weight"
                    stack.enter_context(mock.patch(name, unpacked, create=True))
            yield

    def _load_meta(self, repo_id: str, **kwargs: Any) -> Module:
        try:
            return self._meta(repo_id, **kwargs)
        finally:
            release_classes()

    def _meta(self, repo_id: str, **kwargs: Any) -> Module:
        from vllm.distributed import parallel_state

        if parallel_state.model_parallel_is_initialized() and parallel_state._EP is None:
            # A dense model's groups, of this one process, lack the one of a mixture's experts.
            world = parallel_state.get_world_group()
            backend = torch.distributed.get_backend(world.device_group)
            parallel_state._EP = parallel_state.init_model_parallel_group(
                [world.ranks], world.local_rank, backend, group_name="ep"
            )
        # The tree is never run, so nothing in it should prepare to be compiled.
        kwargs["enforce_eager"] = True
        if not kwargs.get("skip_tokenizer_init"):
            module: Module = super()._load_meta(repo_id, **kwargs)
            return module
        # nnsight sets the padding of whatever tokenizer vLLM gives it; here that is none.
        placeholder = mock.Mock(pad_token="")
        with mock.patch("vllm.tokenizers.cached_tokenizer_from_config", return_value=placeholder):
            module = super()._load_meta(repo_id, **kwargs)
        self.tokenizer = None
        return module

    def _resolve_taps(self, module: Module) -> tuple[str, ...]:
        """Where the taps are: of standard values, by ``support()``'s keys, and nnsight's own."""
        asked = self.taps
        standard = [tap for tap in asked if tap.rsplit(".", 1)[-1] in VOCABULARY]
        self.require(*standard)
        if isinstance(self.layers[0], BackendLayer):
            raise ValueError(
                f"taps with {self.model_name}: none was measured on vLLM's Transformers backend"
            )
        found = []
        for tap in standard:
            for index in range(self.num_layers if ".*." in tap else 1):
                host, name = host_of(self, tap.replace(".*.", f".{index}."))
                value = getattr(type(host), name)
                site = value.site(host)
                if site.prepare is not None:
                    raise Unavailable(
                        f"{value.label(host)} is no tap: it is inside a module, which has to be "
                        f"opened for it while the graphs are recorded"
                    )
                found.append(site.at(host))
        self.taps = tuple(tap for tap in asked if tap not in standard)
        try:
            return (*dict.fromkeys([*found, *super()._resolve_taps(module)]),)
        finally:
            self.taps = asked

    def _load(self, repo_id: str, **kwargs: Any) -> Module:
        before = {name: os.environ.get(name) for name in _SWITCHES}
        if self.taps:
            # Whether a graph is open at the attention is decided where vLLM is imported, which a
            # forked process does no more: it would replay the attention of the recording.
            os.environ[_START_METHOD] = "spawn"
        try:
            module: Module = super()._load(repo_id, **kwargs)
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            if not self.taps:
                release_classes()
        from vllm.v1.engine.core_client import InprocClient

        engine = getattr(self.vllm_entrypoint, "llm_engine", None)
        if engine is not None and isinstance(engine.engine_core, InprocClient):
            self._in_process.add(self)
        else:
            # At exit Python waits for child processes before vLLM ends its own, whenever something
            # was finalized before either was imported; what is registered now comes first.
            self.__dict__["_at_exit"] = partial(_close_at_exit, weakref.ref(self))
            atexit.register(self.__dict__["_at_exit"])
        return module

    def close(self) -> None:
        """End the engine and its processes; the model serves nothing after it."""
        entrypoint, self.vllm_entrypoint, self.closed = self.vllm_entrypoint, None, True
        if entrypoint is None:
            return
        atexit.unregister(self.__dict__.pop("_at_exit", None))
        from vllm.v1.engine.core_client import InprocClient

        core = None if self._async_engine else entrypoint.llm_engine.engine_core
        if not isinstance(core, InprocClient):
            # An engine core that is about to wait for a request sleeps through the signal that
            # ends it, until it is killed: what wakes it (vllm/v1/engine/core.py) is its main
            # thread's handler, which Python runs once the wait, begun too late, is over.
            time.sleep(_TO_REST)
            # By default vLLM kills what has not ended in 5 s, which leaves shared memory behind.
            (entrypoint if core is None else core).shutdown(timeout=60.0)
            return
        from vllm import envs
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        # An engine freezes vLLM's settings for its process, which goes on to make others.
        envs.disable_envs_cache()
        self._in_process.discard(self)
        if self._in_process:
            # The others of this process run in the same groups, which vLLM would end too.
            with mock.patch("vllm.v1.engine.core.cleanup_dist_env_and_memory"):
                core.shutdown()
            return
        core.shutdown()
        if torch.distributed.is_initialized():
            # A vLLM whose engine core leaves its groups to whoever made it.
            cleanup_dist_env_and_memory()

    def __enter__(self) -> StandardizedVLLM:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    # -- values ----------------------------------------------------------------

    lm_head_output: layouts.Logits = unavailable(
        "vLLM never calls lm_head: its logits processor projects with lm_head's weight and "
        "applies any softcap and scale in the same call, on the last position only; read logits"
    )
    attention_mask: layouts.TokenIds = unavailable(
        "a vLLM request is one unpadded sequence; there is no mask"
    )
    input_ids: layouts.TokenIds = value(
        Site(own("input"), Argument("input_ids") | Batched()),
        "``[1, tokens]``: the whole prompt on the prefill, one token on each decode step.",
    )
    input_size: Any = value(
        Site(
            own("input"),
            Derived(
                lambda raw, host: (1, Argument("input_ids").get(raw, host).shape[0]),
                "write input_ids",
            ),
        ),
        "``(1, tokens)``: a request is one sequence.",
    )
    token_embeddings: layouts.Residual = value(
        lambda host: host.unembedded or Site(under("embed_tokens", "output"), host.batched),
        "The embedding module's output, ``[1, tokens, hidden_size]``; what a family scales or "
        "adds positions to comes after.",
    )
    final_norm_output: layouts.Residual = value(
        lambda host: host.no_norm or Site(under("norm", "output"), First() | host.batched),
        "``[1, tokens, hidden_size]``, of which the engine projects the last position. A family "
        "whose blocks hand the stream on in two halves calls the final norm with both, and the "
        "norm returns ``(normed, residual)``: this is the normed half. Assign to replace it; "
        "in-place edits reach the model.",
    )
    logits: layouts.Logits = value(
        Site(own("logits"), Batched()),
        "``[1, 1, vocab_size]``: the engine computes this step's last position only, so "
        "``logits[:, -1]`` reads the same on every engine.",
    )
    next_token_probs: layouts.Probabilities = value(
        Site(own("logits"), Derived(lambda raw, host: raw.softmax(-1), "write logits")),
        "``[1, vocab_size]``, as on every engine.",
    )

    @property
    def batched(self) -> Lens:
        """How the stream of a step is seen: vLLM's Transformers backend batches it already."""
        backend = type(self._module).__module__.startswith(
            "vllm.model_executor.models.transformers"
        )
        return Lens() if backend else Batched()

    @property
    def tensor_parallel_size(self) -> int:
        """Over how many ranks each layer is spread."""
        size: int = self.__dict__["_tensor_parallel"]
        return size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        first: Tensor = next(self._module.parameters())
        return first.dtype

    @property
    def device_type(self) -> str:
        """The kind of device that the engine computes on; this process has no weights."""
        kind: str = current_platform.device_type
        return kind

    @property
    def attn_implementation(self) -> str | None:
        """The name of vLLM's attention backend, ``"CPU_ATTN"``."""
        backends = (getattr(m, "attn_backend", None) for m in self._module.modules())
        return next((str(one.get_name()) for one in backends if one is not None), None)

    # -- running ---------------------------------------------------------------

    @property
    def max_prompt_length(self) -> int | None:
        """One less than the engine's ``max_model_len``: a request makes at least one token."""
        if self.vllm_entrypoint is None:
            return None
        config = (
            self.vllm_entrypoint.model_config
            if self._async_engine
            else self.vllm_entrypoint.llm_engine.model_config
        )
        return int(config.max_model_len) - 1

    def _prompt(self, *inputs: Any) -> Any:
        from vllm.inputs import TokensPrompt

        own_form = len(inputs) == 1 and not (
            isinstance(inputs[0], dict) and "input_ids" not in inputs[0]
        )
        if not own_form:
            return super()._prompt(*inputs)
        return TokensPrompt(prompt_token_ids=self.encode(inputs[0]))

    def _batch(self, invokes: list[tuple[Any, Any]], fn: Any) -> tuple[Any, Any]:
        # The longest prompt is known once there is an engine.
        if not self.dispatched:
            self.dispatch()
        if self.tokenizer is None:
            invokes = [(inputs, {"detokenize": False, **kwargs}) for inputs, kwargs in invokes]
        assembled: tuple[Any, Any] = super()._batch(invokes, fn)
        adapters = {None if one is None else one.lora_int_id for one in assembled[0][2]}
        if len(adapters) > 1 and current_platform.is_cpu():
            raise ValueError(f"{_ONE_ADAPTER}: give each lora_request a trace of its own")
        return assembled

    def prefill(self, *prompt: Any, **kwargs: Any) -> Any:
        """One forward over the whole prompt: ``with model.prefill(prompt) as tracer:``.

        One greedy token is asked of the engine.

        Args:
            *prompt: a string, token ids, a tokenizer's output or chat messages; none, to give
                one with each ``tracer.invoke(...)``.
        """
        return self._greedy(prompt, {"max_tokens": 1, **kwargs})

    def decode(self, *prompt: Any, max_new_tokens: int, **kwargs: Any) -> Any:
        """Greedy decoding: ``with model.decode(prompt, max_new_tokens=n) as tracer:``.

        Each token is the argmax of the raw logits; of the checkpoint's generation config only
        the end tokens are used. The first of ``tracer.iter`` is the prompt's step.

        Raises:
            ValueError: no token is asked for.
        """
        return self._greedy(prompt, {"max_tokens": checked_length(max_new_tokens), **kwargs})

    def _greedy(self, prompt: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        self._refuse_nested()
        settings = {
            "temperature": 0.0,
            "ignore_eos": True,
            "stop_token_ids": self.end_tokens,
            **settings,
        }
        if prompt:
            return self.trace(*prompt, **settings)
        tracer = self.trace(tracer_cls=SettingsTracer)
        tracer.settings = settings
        return tracer

    @property
    def end_tokens(self) -> list[int]:
        """The tokens that end a generation, from the checkpoint's generation config."""
        found = self.__dict__.get("_end_tokens")
        if found is None:
            from vllm.transformers_utils.config import try_get_generation_config

            generation = try_get_generation_config(
                self.args[0],
                trust_remote_code=self.kwargs.get("trust_remote_code", False),
                revision=self.kwargs.get("revision"),
            )
            ends = getattr(generation, "eos_token_id", None)
            ends = [] if ends is None else ends
            found = [int(end) for end in (ends if isinstance(ends, (list, tuple)) else [ends])]
            self.__dict__["_end_tokens"] = found
        return found

    def interleave(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        if self.closed:
            raise RuntimeError(_CLOSED)
        return super().interleave(fn, *args, **kwargs)

    def _attach_mediators(self, params: list[Any], **kwargs: Any) -> Any:
        names = {str(mediator.glbls["__name__"]) for mediator in self.interleaver.mediators}
        with travelling(names):
            return super()._attach_mediators(params, **kwargs)

    def _call(
        self, prompts: list[Any], params: list[Any], lora_requests: list[Any], **kwargs: Any
    ) -> Any:
        # nnsight's own call, without two progress bars for every trace.
        mediators = self._attach_mediators(params, **kwargs)
        with self._whole():
            outputs = self.vllm_entrypoint.generate(
                prompts, sampling_params=params, lora_request=lora_requests, use_tqdm=False
            )
        self._collect(mediators, outputs)
        return outputs

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """End the requests of a call that is interrupted, or they come with the next one's."""
        try:
            yield
        except BaseException:
            with contextlib.suppress(Exception):
                engine = self.vllm_entrypoint.llm_engine
                left = list(engine.output_processor.request_states)
                engine.abort_request(left, internal=True)
                engine.collective_rpc("collect_nnsight", args=(left, left))
            raise

    def edit(self, *args: Any, **kwargs: Any) -> Any:
        """nnsight's edit: a block that stays on the engine and runs for every request, or, with
        ``name=``, for those that ask for it by ``edits=[name]``."""
        tracer = super().edit(*args, **kwargs)
        tracer.__class__ = InstallingTracer
        return tracer

    def trace(self, *inputs: Any, **kwargs: Any) -> Any:
        """nnsight's trace: one request of the engine, with what it reads and writes in the
        block; sampling settings are keyword arguments."""
        self._refuse_nested()
        if kwargs.get("serve"):
            raise ValueError(
                "serve= is not supported: nnsight's server runs its own model, which has no "
                "standard names; load the model here"
            )
        streams = self._async_engine and not kwargs.get("remote")
        if streams and kwargs.get("backend") is None:
            kwargs["backend"] = StreamBackend(self)
        nnsights: Any = super()
        return nnsights.trace(*inputs, **kwargs)

    def _generate(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.closed:
            raise RuntimeError(_CLOSED)
        if self._async_engine:
            return super()._generate(*inputs, **kwargs)
        if not self.dispatched:
            self.dispatch()
        with self._whole():
            outputs = super()._generate(*inputs, **kwargs)
        return self._sound(outputs)

    async def _generate_async(self, *args: Any) -> list[Any]:
        return self._sound(await super()._generate_async(*args))

    def _sound(self, outputs: list[Any]) -> list[Any]:
        """``outputs``, if no block that is installed failed for one of them."""
        for output in outputs:
            if error := getattr(output, "nnsight_error", None):
                self._raise_here(error, None)
        return outputs

    def _raise_here(self, error: dict[str, Any], filename: str | None) -> None:
        """Raise a block's error; ``filename`` is where the trace is, if it is of its block."""
        if "registration" in error:
            filename = self.__dict__["_installed_in"].get(error["registration"])
        _faults.raise_here(error, filename)

    def _collect(self, mediators: list[Any], outputs: list[Any]) -> None:
        errors = [getattr(output, "nnsight_error", None) for output in outputs]
        for output in outputs:
            output.nnsight_error = None
        lists = _shared_lists(mediators)
        VLLM._collect(mediators, outputs)
        for name, before in lists.items():
            saves = [getattr(output, "nnsight_saves", {}) for output in outputs]
            parts = [found[name] for found in saves if type(found.get(name)) is list]
            if len(parts) > 1:
                whole = mark(_gathered(before, parts))
                for mediator in mediators:
                    mediator.lcls[name] = whole
        for i, (output, error) in enumerate(zip(outputs, errors, strict=True)):
            output.nnsight_error = error
            if error:
                filename = mediators[i].code.co_filename if i < len(mediators) else None
                self._raise_here(error, filename)

    # -- methods ---------------------------------------------------------------

    def project_on_vocab(self, hidden: Tensor) -> Tensor:
        """Logits for a residual-stream tensor: the final norm, lm_head, and vLLM's logits
        processor, inside a trace.

        Args:
            hidden: ``[..., hidden]``, of the model's dtype; the leading dimensions are kept. What
                is on the CPU, as everything that was saved, is moved to the weights' device.

        Returns:
            ``[..., vocab]``.

        Raises:
            TypeError: ``hidden`` is of another dtype.
            OutsideTrace: no block is running; there are no weights in this process.
            WrongShape: ``hidden`` is not as wide as the residual stream.
        """
        if running() is None:
            raise OutsideTrace(
                "project_on_vocab runs the engine's modules, so on vLLM it works inside a trace"
            )
        return super().project_on_vocab(hidden)

    def _project(self, hidden: Tensor) -> Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1]).contiguous()
        if not len(flat):
            # CUDA calls a kernel over nothing an error, at whatever is computed next.
            return hidden.new_empty(*hidden.shape[:-1], self.vocab_size)
        normed = self._normed(flat)
        interleaver = self.interleaver
        kept, interleaver.interleaving = interleaver.interleaving, False
        try:
            logits = self._module.compute_logits(normed)
        finally:
            interleaver.interleaving = kept
        found: Tensor = logits.reshape(*hidden.shape[:-1], logits.shape[-1])
        return found

    def order(self, layer: int | None = None) -> dict[str, int]:
        """Not supported on the vllm engine.

        Raises:
            NotImplementedError: the forward order is measured on StandardizedTransformer only.
        """
        raise NotImplementedError(_ORDER)

    def rank(self, name: str, layer: int | None = None) -> tuple[int, int]:
        """Not supported on the vllm engine.

        Raises:
            NotImplementedError: the forward order is measured on StandardizedTransformer only.
        """
        raise NotImplementedError(_ORDER)


_CLOSED = "this model's engine was closed"


def _shared_lists(mediators: list[Any]) -> dict[str, list[Any]]:
    """The lists that were saved above the invokes, as the blocks were sent with them."""
    named = {name: mediator.lcls[name] for mediator in mediators for name in mediator.presaved}
    return {name: list(value) for name, value in named.items() if type(value) is list}


def _gathered(before: list[Any], parts: list[list[Any]]) -> list[Any]:
    """One list of the copies that requests sent home, in their order: what each appended, after
    the slots that there were, each as the last request left it that wrote it."""
    count = len(before)
    if any(len(part) < count for part in parts):
        return parts[-1]
    slots = list(before)
    for part in parts:
        for i, slot in enumerate(part[:count]):
            unwritten = slot is None or (
                isinstance(slot, (bool, int, float, str)) and slot == before[i]
            )
            slots[i] = slots[i] if unwritten else slot
    return slots + [one for part in parts for one in part[count:]]


_ORDER = (
    "not supported on the vllm engine: the forward order is measured on "
    "StandardizedTransformer only"
)
