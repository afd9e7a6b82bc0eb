"""The model runner and worker: where the weights are, the standardized tree is built once.

A block then travels by path: what it mentions of the tree is a name, whatever the depth.
"""

from __future__ import annotations

import base64
from typing import Any

import cloudpickle
import torch
from nnsight.intervention.interleaver import Mediator
from nnsight.modeling.vllm.batching import VLLMBatcher
from nnsight.modeling.vllm.fragments import VLLMFragments
from nnsight.modeling.vllm.interleaver import VLLMInterleaver
from nnsight.modeling.vllm.model_runners.GPUModelRunner import NNsightGPUModelRunner, Requests
from nnsight.modeling.vllm.workers.GPUWorker import NNsightGPUWorker
from nnsight.util import apply
from vllm.platforms import current_platform

from nnterp.core.tracing import KEEP, Block

from . import _faults

CONFIG_KEY = "nnterp"


def packed(description: dict[str, Any]) -> str:
    """What the caller's constructor was given, as text for vLLM's ``additional_config``."""
    return base64.b64encode(cloudpickle.dumps(description)).decode()


def unpacked(text: str) -> dict[str, Any]:
    """The description that :func:`packed` wrote."""
    description: dict[str, Any] = cloudpickle.loads(base64.b64decode(text))
    return description


class TokenBatcher(VLLMBatcher):
    """nnsight's batcher of token spans, which leaves unedited values alone."""

    def widen(self, full: Any, group: Any, edited: Any) -> Any:
        return full if edited is KEEP else super().widen(full, group, edited)


class StandardRequests(Requests):
    """The blocks in flight; their errors keep their types."""

    def record(self, mediator: Mediator) -> None:
        if mediator.exception is None and mediator.worker is not None and not mediator.alive:
            try:
                Block.of(mediator).check_late_edits()
            except Exception as error:
                mediator.exception = error
        super().record(mediator)
        error = getattr(mediator, "nnsight_error", None)
        if error and mediator.exception is not None and "pickled" not in error:
            error["pickled"] = _faults.pickled(mediator.exception)


class StandardRunner(NNsightGPUModelRunner):
    """A runner whose tree is the standardized one."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        from vllm.tokenizers import cached_tokenizer_from_config

        from ._model import StandardizedVLLM

        # nnsight's own load builds its plain tree; what follows is that method, with ours.
        super(NNsightGPUModelRunner, self).load_model(*args, **kwargs)
        extra = self.vllm_config.additional_config
        description = unpacked(extra[CONFIG_KEY])
        model = StandardizedVLLM(
            self.get_model(),
            interleaver=VLLMInterleaver(extra.get("nnsight_taps", ()), fragments=VLLMFragments()),
            **description,
        )
        model.tokenizer = cached_tokenizer_from_config(self.model_config)
        model.__dict__["_tensor_parallel"] = self.parallel_config.tensor_parallel_size
        model.interleaver.batcher = TokenBatcher(None)
        model.interleaver.defer_exceptions = True
        self.nnsight_model = model
        self.nnsight_requests = StandardRequests()
        self.nnsight_persistent_objects = {
            **model._remoteable_persistent_objects(),
            **{envoy.__dict__["_persistent_id"]: envoy for envoy in (model, *model.modules())},
        }

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
        if finished_request_ids and current_platform.is_cuda_alike():
            finished = set(finished_request_ids)
            for request in self.nnsight_requests.requests.values():
                if request.named(finished) and request.mediator is not None:
                    self._to_cpu(request.mediator)
        collected: bytes | None = super().collect_nnsight(
            request_ids, finished_request_ids, outputs
        )
        return collected

    @staticmethod
    def _to_cpu(mediator: Any) -> None:
        """Move what the block saved off the device: the caller's process may have none."""
        for name in getattr(mediator, "nnsight_saved", ()):
            if name in mediator.lcls:
                moved = apply(mediator.lcls[name], lambda tensor: tensor.cpu(), torch.Tensor)
                dict.__setitem__(mediator.lcls, name, moved)


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
