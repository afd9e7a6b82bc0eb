"""The model runner and worker: where the weights are, the standardized tree is built once.

A block then travels by path: what it mentions of the tree is a name, whatever the depth.
"""

from __future__ import annotations

import base64
import linecache
import pickle
import warnings
from typing import Any

import cloudpickle
import torch
from nnsight.intervention.errors import capture_exception
from nnsight.intervention.interleaver import Mediator
from nnsight.modeling.vllm.batching import VLLMBatcher
from nnsight.modeling.vllm.collect import dumps_compact
from nnsight.modeling.vllm.fragments import VLLMFragments
from nnsight.modeling.vllm.interleaver import VLLMInterleaver
from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner, Requests
from nnsight.modeling.vllm.workers.GPUWorker import NNsightGPUWorker
from nnsight.tracing.tracer import _saves, mark
from nnsight.util import apply
from vllm.platforms import current_platform

from nnterp.core import Preempted, WrongShape
from nnterp.core.tracing import KEEP, Block

from . import _faults
from ._travel import modules_of, travelling
from ._watchdog import Ended, Watched, deadline

CONFIG_KEY = "nnterp"


def packed(description: dict[str, Any]) -> str:
    """What the caller's constructor was given, as text for vLLM's ``additional_config``."""
    family, envoys = description["family"], description["envoys"]
    things = [family, *getattr(family, "__dict__", {}).values(), *(envoys or {}).values()]
    with travelling(modules_of(things)):
        return base64.b64encode(cloudpickle.dumps(description)).decode()


def unpacked(text: str) -> dict[str, Any]:
    """The description that :func:`packed` wrote."""
    description: dict[str, Any] = cloudpickle.loads(base64.b64decode(text))
    return description


class TokenBatcher(VLLMBatcher):
    """nnsight's batcher of token spans, which leaves unedited values alone and refuses what
    would end the engine for every request."""

    def __init__(self, interleaver: Any) -> None:
        super().__init__(None)
        self.interleaver = interleaver

    def widen(self, full: Any, group: Any, edited: Any) -> Any:
        if edited is KEEP:
            return full
        self._mark(group)
        widened = super().widen(full, group, edited)
        found, expected = _tensors(widened), _tensors(full)
        if [shape for shape, *_ in found] != [shape for shape, *_ in expected]:
            raise WrongShape(
                f"a write keeps the shape; with this one the step's {expected} would be {found}"
            )
        if found != expected:
            # One row of another dtype would make everybody's rows another dtype.
            raise TypeError(
                f"a write keeps dtype and device; with this one the step's {expected} would be "
                f"{found}"
            )
        return widened

    def _mark(self, group: Any) -> None:
        for mediator in self.interleaver.mediators:
            if mediator.batch_group is group:
                Block.of(mediator).wrote = True

    def gather_skip(self, running: Any, group: Any, replacement: Any) -> Any:
        self._mark(group)
        if group is not None and group[1] != self.total:
            raise ValueError(
                "a module cannot be skipped while other requests run through it; for a block, "
                "model.skip_layers(...) replaces this request's rows alone"
            )
        return super().gather_skip(running, group, replacement)


def _tensors(value: Any) -> list[tuple[tuple[int, ...], str, str]]:
    """Shape, dtype and device of every tensor, in order."""
    found: list[tuple[tuple[int, ...], str, str]] = []

    def note(tensor: torch.Tensor) -> None:
        found.append((tuple(tensor.shape), str(tensor.dtype), str(tensor.device)))

    apply(value, note, torch.Tensor)
    return found


class StandardRequests(Requests):
    """The blocks in flight, under the watchdog; their errors keep their types."""

    def __init__(self, block_timeout: float, vocabulary: int, sampled: str) -> None:
        super().__init__()
        self.block_timeout = block_timeout
        self.vocabulary = vocabulary
        self.sampled = sampled
        self.wrote: set[str] = set()

    def add(self, new_requests: list[Any], persistent_objects: dict[Any, Any]) -> None:
        with deadline(self.block_timeout):  # what travels is rebuilt by code of the caller's
            super().add(new_requests, persistent_objects)
        for data in new_requests:
            for mediator in self.requests[data.req_id].workers():
                if type(mediator) is Mediator:
                    mediator.__class__ = Watched
                    mediator.limit = self.block_timeout
                    mediator.vocabulary = self.vocabulary
                    mediator.sampled = self.sampled

    def resume(self, interleaver: Any, spans: list[tuple[str, int]], resumed: set[str]) -> None:
        """Go on with requests that the engine took out of the batch and computes anew.

        The step runs over all their tokens so far, of which a block is at the last. One that
        changed something is ended: what is computed anew has not its edits.
        """
        start = 0
        for row, (request_id, tokens) in enumerate(spans):
            request = self.requests.get(request_id)
            if request is not None and request_id in resumed:
                for mediator in request.workers():
                    if mediator.worker is None:
                        continue
                    last = [start + tokens - 1, 1]
                    if mediator.batch_group is not None:
                        mediator.batch_group = last
                    if Block.of(mediator).wrote and mediator.exception is None:
                        self._preempt(mediator)
                        # Kept in the step, so that the request is ended by its next token.
                        mediator.batch_group, mediator.row = last, row
                        if mediator not in interleaver.mediators:
                            interleaver.mediators.append(mediator)
            start += tokens
        interleaver.reindex()

    def _preempt(self, mediator: Mediator) -> None:
        error: BaseException = Preempted(
            "the engine ran out of cache and computes this request anew, without the edits its "
            "block made; run fewer requests at once, or give the engine more cache "
            "(kv_cache_memory_bytes=, gpu_memory_utilization=)"
        )
        mediator.exception = error
        if mediator.alive:
            try:
                with deadline(self.block_timeout):
                    mediator.worker.throw(error)
            except BaseException as thrown:
                if isinstance(thrown, Exception):
                    mediator.exception = thrown
        mediator.pending = None

    def finish_dangling(self, mediator: Any, *args: Any, **kwargs: Any) -> None:
        with deadline(self.block_timeout):  # the block's last lines may run here
            super().finish_dangling(mediator, *args, **kwargs)

    def serve_result(self, mediator: Any, output: Any) -> None:
        super().serve_result(mediator, output)
        if mediator is not None:
            self._make_ready(mediator)

    def harvest(self, finished: set[str]) -> None:
        copies = [
            (name, mediator)
            for request in self.requests.values()
            if request.named(finished)
            for name, mediator in request.copies.items()
        ]
        for name, mediator in copies:
            self._make_ready(mediator)
            if error := getattr(mediator, "nnsight_error", None):
                error["registration"] = name
        super().harvest(finished)

    def unregister(self, registration_id: str) -> None:
        template = self.templates.get(registration_id)
        super().unregister(registration_id)
        self.forget(template)

    @staticmethod
    def forget(mediator: Mediator | None) -> None:
        """Drop the source that nnsight keeps of a block, of which there is one a request."""
        if mediator is not None:
            linecache.cache.pop(mediator.code.co_filename, None)

    def record_saves(self) -> None:
        super().record_saves()
        for request in self.requests.values():
            if any(Block.of(mediator).wrote for mediator in request.workers()):
                self.wrote.add(request.id)

    def record(self, mediator: Mediator) -> None:
        if mediator.exception is None and mediator.worker is not None and not mediator.alive:
            try:
                Block.of(mediator).check_late_edits()
            except Exception as error:
                mediator.exception = error
        if isinstance(mediator.exception, Ended):
            mediator.exception = mediator.exception.cause
        try:
            super().record(mediator)
        except Exception:
            kind = type(mediator.exception).__name__
            mediator.exception = RuntimeError(f"the block raised {kind}, which has no text")
            super().record(mediator)
        found = getattr(mediator, "nnsight_error", None)
        if found and mediator.exception is not None and "pickled" not in found:
            found["pickled"] = _faults.pickled(mediator.exception)

    def make_ready(self, request: Any) -> None:
        """Make what a request's blocks saved ready to leave the engine."""
        for mediator in request.workers():
            self._make_ready(mediator)

    def _make_ready(self, mediator: Any) -> None:
        """On the CPU, since the caller's process may have no device, and without what does not
        arrive, which is the block's error."""
        saved: set[str] = getattr(mediator, "nnsight_saved", set())
        for name in sorted(saved & set(mediator.lcls)):
            value = mediator.lcls[name]
            if current_platform.is_cuda_alike():
                # nnsight knows what is saved by its address, which another tensor may be given.
                _saves().discard(id(value))
                value = mark(apply(value, lambda tensor: tensor.cpu(), torch.Tensor))
                dict.__setitem__(mediator.lcls, name, value)
            if _travels(value):
                continue
            try:
                with deadline(self.block_timeout):
                    pickle.loads(dumps_compact(value))
            except Exception as error:
                saved.discard(name)
                mediator.presaved.discard(name)
                unsent = TypeError(f"{name!r} was saved and cannot leave the engine: {error}")
                mediator.nnsight_error = {
                    **capture_exception(unsent),
                    "pickled": _faults.pickled(unsent),
                }


class StandardRunner(NNsightGPUModelRunner):
    """A runner whose tree is the standardized one."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        from vllm.tokenizers import cached_tokenizer_from_config

        from ._model import StandardizedVLLM

        # nnsight's own load builds its plain tree; what follows is that method, with ours.
        super(NNsightGPUModelRunner, self).load_model(*args, **kwargs)
        extra = self.vllm_config.additional_config
        description = unpacked(extra[CONFIG_KEY])
        block_timeout = description.pop("block_timeout")
        taps = extra.get("nnsight_taps", ())
        model = StandardizedVLLM(
            self.get_model(),
            taps=taps,
            interleaver=VLLMInterleaver(taps, fragments=VLLMFragments()),
            **description,
        )
        model.tokenizer = cached_tokenizer_from_config(self.model_config)
        model.__dict__["_tensor_parallel"] = self.parallel_config.tensor_parallel_size
        model.interleaver.batcher = TokenBatcher(model.interleaver)
        model.interleaver.defer_exceptions = True
        self.nnsight_model = model
        self.nnsight_requests = StandardRequests(
            block_timeout, self.model_config.get_vocab_size(), f"{model.path}.samples"
        )
        envoys = [model, *model.modules()]
        # Sublayers that are no modules of their own are in no list of modules.
        envoys += [
            vars(envoy)[name] for envoy in envoys for name in getattr(type(envoy), "on_block", ())
        ]
        self.nnsight_persistent_objects = {
            **model._remoteable_persistent_objects(),
            **{envoy.__dict__["_persistent_id"]: envoy for envoy in envoys},
        }

    def _clear_cache(self, request_ids: set[str]) -> None:
        """Zero what requests leave in the key-value cache.

        A kernel multiplies a block's unused rows by zero, so a NaN of the block's last owner
        would be a NaN of its next one.
        """
        states = [self.requests[id] for id in request_ids if id in self.requests]
        blocks = sorted({b for state in states for group in state.block_ids for b in group})
        if not blocks:
            return
        for cache in self.kv_caches:
            if not isinstance(cache, torch.Tensor):
                continue  # a recurrent state, which a new request starts by itself
            count = self.kv_cache_config.num_blocks
            axis = 0 if cache.shape[0] % count == 0 else 1
            # A block of the scheduler's may be several of the kernel's.
            ratio = cache.shape[axis] // count
            rows = [block * ratio + part for block in blocks for part in range(ratio)]
            cache.index_fill_(axis, torch.tensor(rows, device=cache.device), 0)
        for state in states:
            # They have other owners from here on: a preempted request may end before it resumes.
            state.block_ids = tuple([] for _ in state.block_ids)

    def _update_states(self, scheduler_output: Any) -> Any:
        wrote, finished = self.nnsight_requests.wrote, scheduler_output.finished_req_ids
        left = set(finished) | set(scheduler_output.preempted_req_ids or ())
        if left & wrote:
            self._clear_cache(left & wrote)
            wrote.difference_update(finished)
        updated = super()._update_states(scheduler_output)
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        if resumed:
            tokens = scheduler_output.num_scheduled_tokens
            spans = [(rid, tokens[rid]) for rid in self.input_batch.req_ids if rid in tokens]
            self.nnsight_requests.resume(self.nnsight_model.interleaver, spans, set(resumed))
        return updated

    def _finish_erred(self, sampler_output: Any) -> None:
        # A request that ignores the tokenizer's end token ends by one of its own stop tokens.
        for request in self.nnsight_requests.requests.values():
            mediator = request.mediator
            if mediator is None or mediator.exception is None or mediator.batch_group is None:
                continue
            settings = self.requests[request.id].sampling_params
            end = getattr(self.nnsight_model.tokenizer, "eos_token_id", None)
            if settings is not None and (settings.ignore_eos or end is None):
                end = next(iter(settings.stop_token_ids or ()), None)
            if end is not None:
                sampler_output.sampled_token_ids[mediator.batch_group[0]] = end

    def collect_nnsight(
        self,
        request_ids: list[str],
        finished_request_ids: list[str] | None = None,
        outputs: dict[str, Any] | None = None,
    ) -> bytes | None:
        requests, finished = self.nnsight_requests, set(finished_request_ids or ())
        over = [request for request in requests.requests.values() if request.named(finished)]
        requests.harvest(finished)
        for request in over:
            requests.make_ready(request)
        with warnings.catch_warnings():
            if outputs is None:
                # Nobody waits for what was aborted, so nobody is told what it did not reach.
                warnings.simplefilter("ignore", UserWarning)
            collected: bytes | None = super().collect_nnsight(
                request_ids, finished_request_ids, outputs
            )
        for request in over:
            requests.forget(request.mediator)
        return collected


def _travels(value: Any) -> bool:
    """Whether a value is of tensors and simple containers alone, which always travel."""
    try:
        return _plain(value)
    except RecursionError:
        return False


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_plain, value))
    if isinstance(value, dict):
        return type(value) is dict and all(map(_plain, value)) and all(map(_plain, value.values()))
    return value is None or isinstance(value, (torch.Tensor, str, int, float, bool))


class CUDARunner(StandardRunner):
    """On CUDA."""


class CUDAWorker(NNsightGPUWorker):
    """A GPU worker that runs :class:`CUDARunner`."""

    def init_device(self) -> None:
        super().init_device()
        self.model_runner.__class__ = CUDARunner


if current_platform.is_cpu():
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker as _CPUWorker

    class CPURunner(StandardRunner, CPUModelRunner):
        """On the CPU: nnsight's runner over vLLM's CPU one."""

    class CPUWorker(_CPUWorker):
        """A CPU worker that runs :class:`CPURunner`, with nnsight's remote methods."""

        def init_device(self) -> None:
            super().init_device()
            runner = self.model_runner
            if type(runner) is not CPUModelRunner:
                raise NotImplementedError(
                    f"vLLM built {type(runner).__name__}, which nnsight does not instrument; "
                    f"unset VLLM_USE_V2_MODEL_RUNNER"
                )
            runner.__class__ = CPURunner

        collect_nnsight = NNsightGPUWorker.collect_nnsight
        nnsight_request_count = NNsightGPUWorker.nnsight_request_count
        nnsight_register = NNsightGPUWorker.nnsight_register
        nnsight_clear_registered = NNsightGPUWorker.nnsight_clear_registered


def worker_path() -> str:
    """The worker that this machine's engine runs, by its import path."""
    name = "CPUWorker" if current_platform.is_cpu() else "CUDAWorker"
    return f"{__name__}.{name}"
