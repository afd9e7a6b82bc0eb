"""Requests of many kinds for one engine: what each gives alone, it must give beside others.

A kind is a function that opens its trace and gives the tracer back; its block is sent to the
engine as any caller's would be. A request runs every block that is installed on the engine, or
those that it names: here most name none.
"""

# ruff: noqa: F841 -- what a block binds and saves comes home by its name
from __future__ import annotations

import asyncio
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from nnterp.core import OutOfOrder, Preempted, Unavailable, WrongShape
from nnterp.core.testing import row_error

BOUND = 1e-5
TIMEOUT = 120.0
"""Seconds after which a request counts as stuck."""

VOCABULARY = 304


class Mine(Exception):
    """An error of the caller's own."""


class Unsent:
    """Something that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("it stays here")


class Unread:
    """Something that is pickled and cannot be read again."""

    def __reduce__(self) -> Any:
        return (int, ("no number",))


@dataclass(frozen=True)
class Request:
    """One request: its kind, and what it is asked with."""

    kind: str
    prompt: tuple[int, ...]
    tokens: int
    seed: int


@dataclass
class Outcome:
    """What a request gave: its tokens and values, or its error."""

    tokens: list[int] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None


Kind = Callable[[Any, Request], Any]
HEALTHY: dict[str, Kind] = {}
FAULTY: dict[str, Kind] = {}
EXPECTED: dict[str, type[BaseException]] = {}
EDITING: set[str] = set()
"""Kinds that change what the model computes, which may end as ``Preempted``."""


def healthy(kind: Kind) -> Kind:
    HEALTHY[kind.__name__] = kind
    return kind


def editing(kind: Kind) -> Kind:
    EDITING.add(kind.__name__)
    return healthy(kind)


def faulty(error: type[BaseException]) -> Callable[[Kind], Kind]:
    def register(kind: Kind) -> Kind:
        FAULTY[kind.__name__] = kind
        EXPECTED[kind.__name__] = error
        return kind

    return register


# -- requests that must be right ----------------------------------------------------


@healthy
def reads(model, request):
    n = request.tokens
    with model.decode(list(request.prompt), max_new_tokens=n, edits=[]) as tracer:
        ids = model.input_ids.save()
        first = model.layers[0].self_attn.attention_output.save()
        mlp = model.layers[1].mlp.mlp_output.save()
        stream = model.layers[2].layer_output.save()
        rows = [].save()
        rows.append(model.logits[0, -1])
        for _ in tracer.iter[1:n]:
            rows.append(model.layers[1].layer_output[0, -1])
            rows.append(model.logits[0, -1])
    return tracer


@healthy
def interior(model, request):
    with model.prefill(list(request.prompt), edits=[]) as tracer:
        queries = model.layers[1].self_attn.attention_queries.save()
        pattern = model.layers[1].self_attn.attention_probabilities.save()
        heads = model.layers[1].self_attn.attention_head_outputs.save()
        neurons = model.layers[1].mlp.mlp_neurons.save()
        probabilities = model.next_token_probs.save()
    return tracer


@editing
def assigns(model, request):
    n = request.tokens
    with model.decode(list(request.prompt), max_new_tokens=n, edits=[]) as tracer:
        rows = [].save()
        for _ in tracer.iter[0:n]:
            model.layers[1].layer_output = model.layers[1].layer_output * 0.5
            rows.append(model.logits[0, -1])
    return tracer


@editing
def edits_the_prompt(model, request):
    with model.decode(list(request.prompt), max_new_tokens=request.tokens, edits=[]) as tracer:
        model.layers[0].mlp.mlp_output[:, 1:] += 0.7
        stream = model.layers[2].layer_output.save()
        logits = model.logits.save()
    return tracer


@editing
def skips(model, request):
    n = request.tokens
    with model.decode(list(request.prompt), max_new_tokens=n, edits=[]) as tracer:
        rows = [].save()
        for _ in tracer.iter[0:n]:
            model.skip_layers(1, 1)
            rows.append(model.logits[0, -1])
    return tracer


@editing
def steers(model, request):
    vector = torch.linspace(-1, 1, 96)
    with model.prefill(list(request.prompt), edits=[]) as tracer:
        model.steer([0, 2], vector, factor=2.0)
        logits = model.logits.save()
        lens = model.project_on_vocab(torch.ones(1, 2, 96)).save()  # as what was saved, on the CPU
    return tracer


@healthy
def stops(model, request):
    with model.decode(list(request.prompt), max_new_tokens=request.tokens, edits=[]) as tracer:
        stream = model.layers[1].layer_output.save()
        tracer.stop()
    return tracer


@editing
def ends_early(model, request):
    n = request.tokens
    end = model.end_tokens[0]
    with model.decode(list(request.prompt), max_new_tokens=n + 6, edits=[]) as tracer:
        rows = [].save()
        for step in tracer.iter[0 : n + 6]:
            rows.append(model.layers[0].layer_output[0, -1])
            if step == 2:
                model.logits[:, :, end] = 1e4
    return tracer


@healthy
def samples(model, request):
    n, seed = request.tokens, request.seed
    with model.trace(
        list(request.prompt),
        max_tokens=n,
        min_tokens=n,
        temperature=0.7,
        top_k=20,
        top_p=0.9,
        seed=seed,
        detokenize=False,
        edits=[],
    ) as tracer:
        logits = model.logits.save()
    return tracer


@healthy
def penalises(model, request):
    n = request.tokens
    with model.decode(
        list(request.prompt), max_new_tokens=n, repetition_penalty=1.3, logprobs=2, edits=[]
    ) as tracer:
        rows = [].save()
        for _ in tracer.iter[0:n]:
            rows.append(model.logits[0, -1])
    return tracer


@editing
def chooses_an_edit(model, request):
    with model.decode(
        list(request.prompt), max_new_tokens=request.tokens, edits=["halved"]
    ) as tracer:
        stream = model.layers[0].layer_output.save()
        logits = model.logits.save()
    return tracer


@editing
def writes_nan(model, request):
    with model.prefill(list(request.prompt), edits=[]) as tracer:
        model.layers[1].layer_output[:] = float("nan")
        logits = model.logits.isnan().all().save()
    return tracer


@editing
def writes_what_needs_grad(model, request):
    with model.prefill(list(request.prompt), edits=[]) as tracer:
        old = model.layers[1].layer_output
        model.layers[1].layer_output = torch.ones_like(old).requires_grad_() * 0.1
        logits = model.logits.save()
    return tracer


@healthy
def has_no_block(model, request):
    settings = {
        "max_tokens": request.tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "detokenize": False,
    }
    return model.generate([{"prompt_token_ids": list(request.prompt)}], edits=[], **settings)


# -- requests that must fail by themselves -------------------------------------------


@faulty(Mine)
def raises(model, request):
    n = request.tokens
    with model.decode(list(request.prompt), max_new_tokens=n, edits=[]) as tracer:
        for step in tracer.iter[0:n]:
            stream = model.layers[1].layer_output
            if step == 2:
                raise Mine("the third step")
    return tracer


@faulty(Mine)
def raises_at_once(model, request):
    with model.prefill(list(request.prompt), edits=[]) as tracer:
        raise Mine("before anything is read")
    return tracer


@faulty(OutOfOrder)
def reads_backwards(model, request):
    with model.decode(list(request.prompt), max_new_tokens=request.tokens, edits=[]) as tracer:
        late = model.layers[2].layer_output.save()
        early = model.layers[0].layer_output.save()
    return tracer


@faulty(OutOfOrder)
def edits_late(model, request):
    with model.decode(list(request.prompt), max_new_tokens=request.tokens, edits=[]) as tracer:
        early = model.layers[0].layer_output
        late = model.layers[1].layer_output
        early[:] = 0
        logits = model.logits.save()
    return tracer


@faulty(WrongShape)
def writes_a_wrong_shape(model, request):
    with model.decode(list(request.prompt), max_new_tokens=request.tokens, edits=[]) as tracer:
        model.layers[1].layer_output = torch.zeros(1, 2, 96)
    return tracer


@faulty(WrongShape)
def writes_a_wrong_shape_natively(model, request):
    with model.decode(list(request.prompt), max_new_tokens=request.tokens, edits=[]) as tracer:
        mlp, residual = model.layers[1].output
        model.layers[1].output = (mlp[:1], residual[:1])
    return tracer


@faulty(TypeError)
def writes_a_wrong_dtype(model, request):
    with model.decode(list(request.prompt), max_new_tokens=request.tokens, edits=[]) as tracer:
        model.layers[1].layer_output = model.layers[1].layer_output.double()
    return tracer


@faulty(TypeError)
def writes_a_wrong_dtype_natively(model, request):
    with model.decode(list(request.prompt), max_new_tokens=request.tokens, edits=[]) as tracer:
        first, second = model.layers[1].output
        model.layers[1].output = (first.double(), second.double())
    return tracer


@faulty(ValueError)
def writes_a_wrong_device(model, request):
    with model.decode(list(request.prompt), max_new_tokens=request.tokens, edits=[]) as tracer:
        model.layers[1].layer_output = model.layers[1].layer_output.to("meta")
    return tracer


@faulty(ValueError)
def writes_no_token(model, request):
    with model.decode(list(request.prompt), max_new_tokens=request.tokens, edits=[]) as tracer:
        model.input_ids[:] = 10**6
        logits = model.logits.save()
    return tracer


@faulty(ValueError)
def samples_no_token(model, request):
    with model.decode(list(request.prompt), max_new_tokens=request.tokens, edits=[]) as tracer:
        model.samples = torch.full_like(model.samples, 10**6)
    return tracer


@faulty(TypeError)
def saves_what_stays(model, request):
    with model.decode(list(request.prompt), max_new_tokens=request.tokens, edits=[]) as tracer:
        unsent = Unsent().save()
        logits = model.logits.save()
    return tracer


@faulty(TypeError)
def saves_what_cannot_be_read(model, request):
    with model.decode(list(request.prompt), max_new_tokens=request.tokens, edits=[]) as tracer:
        logits = model.logits.save()
        unread = {"here": [Unread()]}.save()
    return tracer


@faulty(IndexError)
def names_no_layer(model, request):
    with model.decode(list(request.prompt), max_new_tokens=request.tokens, edits=[]) as tracer:
        stream = model.layers[99].layer_output.save()
    return tracer


@faulty(Unavailable)
def names_what_is_not_served(model, request):
    with model.decode(list(request.prompt), max_new_tokens=request.tokens, edits=[]) as tracer:
        stream = model.layers[0].layer_output.save()
        logits = model.lm_head_output.save()
    return tracer


@faulty(RuntimeError)
def asks_for_too_much(model, request):
    with model.decode(list(request.prompt), max_new_tokens=request.tokens, edits=[]) as tracer:
        stream = model.layers[0].layer_output
        large = torch.empty(10**15)
    return tracer


@faulty(RuntimeError)
def exits(model, request):
    with model.decode(list(request.prompt), max_new_tokens=request.tokens, edits=[]) as tracer:
        stream = model.layers[0].layer_output
        sys.exit(3)
    return tracer


@faulty(RuntimeError)
def recurses(model, request):
    def again(depth):
        return again(depth + 1)

    with model.decode(list(request.prompt), max_new_tokens=request.tokens, edits=[]) as tracer:
        stream = model.layers[0].layer_output
        again(0)
    return tracer


@faulty(ValueError)
def asks_for_no_edit(model, request):
    with model.decode(
        list(request.prompt), max_new_tokens=request.tokens, edits=["nowhere"]
    ) as tracer:
        stream = model.layers[0].layer_output
    return tracer


@faulty(WrongShape)
def chooses_a_broken_edit(model, request):
    with model.decode(
        list(request.prompt), max_new_tokens=request.tokens, edits=["broken"]
    ) as tracer:
        logits = model.logits.save()
    return tracer


# Each holds up everybody for as long as the watchdog waits, so they are few.


@faulty(TimeoutError)
def loops(model, request):
    with model.decode(list(request.prompt), max_new_tokens=request.tokens, edits=[]) as tracer:
        stream = model.layers[0].layer_output
        while True:
            pass
    return tracer


@faulty(TimeoutError)
def loops_whatever_comes(model, request):
    with model.decode(list(request.prompt), max_new_tokens=request.tokens, edits=[]) as tracer:
        stream = model.layers[0].layer_output
        while True:
            try:
                time.sleep(0.01)
            except BaseException:
                continue
    return tracer


SLOW = ("loops", "loops_whatever_comes")


# -- running ---------------------------------------------------------------------------


async def install(model: Any) -> None:
    """The blocks that stay on the engine, for who asks for them by name."""
    async with model.edit(name="halved") as (_, _):
        model.layers[1].self_attn.attention_output[:] *= 0.5
    async with model.edit(name="broken") as (_, _):
        model.layers[1].layer_output = torch.zeros(1, 1, 1)


def requests(count: int, seed: int, longest: int = 14, slow: bool = True) -> list[Request]:
    """``count`` requests, a third of them faulty, in an order that mixes the kinds."""
    rng = random.Random(seed)
    faults = [kind for kind in FAULTY if kind not in SLOW]
    kinds = [*(SLOW if slow else ())]
    while len(kinds) < count // 3:
        kinds.append(faults[len(kinds) % len(faults)])
    right = list(HEALTHY)
    kinds += [right[index % len(right)] for index in range(count - len(kinds))]
    rng.shuffle(kinds)
    return [
        Request(
            kind=kind,
            prompt=tuple(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(3, 40))),
            tokens=rng.randint(4, longest),
            seed=rng.randrange(2**31),
        )
        for kind in kinds
    ]


async def run(model: Any, request: Request) -> Outcome:
    """One request on an asynchronous engine, to its end."""
    kind = (HEALTHY | FAULTY)[request.kind]
    try:
        asked = kind(model, request)
        output = (
            (await asked)[0]
            if asyncio.iscoroutine(asked)
            else await asyncio.wait_for(_drained(asked), TIMEOUT)
        )
    except asyncio.CancelledError:
        raise
    except BaseException as error:
        return Outcome(error=error)
    return Outcome(list(output.outputs[0].token_ids), dict(getattr(output, "saves", {})))


async def _drained(tracer: Any) -> Any:
    return await tracer.backend


async def alone(model: Any, asked: list[Request]) -> list[Outcome]:
    """Each request with the engine to itself."""
    return [await run(model, request) for request in asked if request.kind not in FAULTY]


async def together(model: Any, asked: list[Request], at_once: int = 64) -> list[Outcome]:
    """All requests, so many of them in flight at any time."""
    free = asyncio.Semaphore(at_once)

    async def one(request: Request) -> Outcome:
        async with free:
            return await run(model, request)

    return list(await asyncio.gather(*(one(request) for request in asked)))


async def in_flight(model: Any) -> int:
    """How many requests the engine's worker holds blocks for."""
    (count,) = await model.vllm_entrypoint.collective_rpc("nnsight_request_count")
    return int(count)


def differences(expected: Outcome, found: Outcome) -> list[str]:
    """In what a request differs from itself alone."""
    if expected.error is not None:
        return [f"it failed alone: {expected.error!r}"]
    if found.error is not None:
        return [f"it failed: {type(found.error).__name__}: {found.error}"]
    problems = []
    if found.tokens != expected.tokens:
        problems.append(f"tokens {found.tokens}, alone {expected.tokens}")
    if found.values.keys() != expected.values.keys():
        problems.append(f"values {sorted(found.values)}, alone {sorted(expected.values)}")
    for name in found.values.keys() & expected.values.keys():
        problems += [f"{name}: {one}" for one in _apart(found.values[name], expected.values[name])]
    return problems


def _apart(found: Any, expected: Any) -> Iterator[str]:
    if isinstance(expected, list):
        if len(found) != len(expected):
            yield f"{len(found)} entries, alone {len(expected)}"
        for one, other in zip(found, expected, strict=False):
            yield from _apart(one, other)
    elif not isinstance(expected, torch.Tensor):
        if found != expected:
            yield f"{found}, alone {expected}"
    elif found.shape != expected.shape or found.dtype != expected.dtype:
        yield f"{tuple(found.shape)} {found.dtype}, alone {tuple(expected.shape)} {expected.dtype}"
    elif expected.dtype.is_floating_point and expected.dim():
        worst = row_error(found, expected)
        if not worst <= BOUND:
            yield f"a row is {worst:.1e} off"
    elif not torch.equal(found, expected):
        yield "another value"


@dataclass
class Report:
    """What a soak found."""

    problems: list[str]
    counts: Counter[str]
    preempted: int
    left: int
    seconds: float

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(self.counts.items()))
        return (
            f"{sum(self.counts.values())} requests in {self.seconds:.1f} s, {self.preempted} "
            f"preempted, {self.left} left in the worker, {len(self.problems)} problems\n  {kinds}\n"
            + "\n".join(f"  {problem}" for problem in self.problems)
        )


async def soak(model: Any, asked: list[Request], at_once: int = 64) -> Report:
    """Run requests alone, then together, and compare."""
    await install(model)
    healthy = [request for request in asked if request.kind in HEALTHY]
    expected = dict(zip(map(id, healthy), await alone(model, healthy), strict=True))
    started = time.perf_counter()
    outcomes = await together(model, asked, at_once)
    seconds = time.perf_counter() - started
    problems, preempted = [], 0
    for request, outcome in zip(asked, outcomes, strict=True):
        name = f"{request.kind} ({len(request.prompt)} + {request.tokens} tokens)"
        if isinstance(outcome.error, Preempted) and request.kind in (EDITING | FAULTY.keys()):
            preempted += 1
        elif request.kind in FAULTY:
            # The error's own class, whatever else it is as well.
            if not isinstance(outcome.error, EXPECTED[request.kind]) or isinstance(
                outcome.error, asyncio.TimeoutError
            ) != (request.kind in SLOW):
                problems.append(f"{name}: {outcome.error!r}")
        else:
            problems += [f"{name}: {one}" for one in differences(expected[id(request)], outcome)]
    await model.aclear_edits()
    counts = Counter(request.kind for request in asked)
    return Report(problems, counts, preempted, await in_flight(model), seconds)


@contextmanager
def asynchronous(path: str, **options: Any) -> Iterator[Any]:
    """An asynchronous engine, in processes of its own as always."""
    from nnterp.vllm import StandardizedVLLM

    defaults: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "block_timeout": 2.0}
    with StandardizedVLLM(path, mode="async", dispatch=True, **{**defaults, **options}) as model:
        yield model
