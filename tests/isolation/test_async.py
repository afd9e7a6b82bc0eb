"""The asynchronous engine: streams at once, streams left early, edits by name, errors."""

from __future__ import annotations

import asyncio
import gc
import traceback

import pytest
import torch
import workload

from nnterp.core import OutOfOrder, OutsideTrace, Unavailable, WrongShape
from nnterp.core.testing import assert_close

pytestmark = pytest.mark.slow

P = [5, 17, 250, 9, 33]
BOUND = 1e-5


@pytest.fixture(scope="module")
def runner():
    # An engine belongs to the loop that first drives it.
    with asyncio.Runner() as found:
        yield found


@pytest.fixture(scope="module")
def model(checkpoint, runner):
    async def opened():
        context = workload.asynchronous(checkpoint("llama"))
        return context, context.__enter__()

    context, found = runner.run(opened())
    yield found

    async def closed():
        context.__exit__(None, None, None)

    runner.run(closed())


@pytest.fixture
def run(runner, model):
    """Run a coroutine on the engine's loop; nothing of it stays in the worker."""

    def through(coroutine):
        found = runner.run(asyncio.wait_for(coroutine, 60))
        assert runner.run(workload.in_flight(model)) == 0
        return found

    return through


@pytest.fixture(scope="module")
def record(reference):
    return reference("llama").run(P, steps=4)


def prefilled(model):
    with model.prefill(P, edits=[]) as tracer:
        stream = model.layers[1].layer_output.save()  # noqa: F841
        logits = model.logits.save()  # noqa: F841
    return tracer.backend


async def drained(backend):
    return await backend


def test_prefill_and_decode(model, run, record):
    output = run(drained(prefilled(model)))
    stream = output.saves["stream"]
    assert_close(stream, record.get("layers.1.layer_output"), BOUND, "layers.1.layer_output")
    assert len(output.outputs[0].token_ids) == 1

    async def decoded():
        with model.decode(P, max_new_tokens=4) as tracer:
            rows = [].save()
            for _ in tracer.iter[0:4]:
                rows.append(model.logits[:, -1])
        return await tracer.backend

    output = run(decoded())
    assert list(output.outputs[0].token_ids) == record.tokens
    for step, row in enumerate(output.saves["rows"]):
        assert_close(row, record.get("logits", step)[:, -1], BOUND, f"logits of step {step}")


def test_a_stream_gives_every_step(model, run):
    async def streamed():
        with model.decode(P, max_new_tokens=5) as tracer:
            logits = model.logits.save()  # noqa: F841
        outputs = [output async for output in tracer.backend]
        return [(len(output.outputs[0].token_ids), sorted(output.saves)) for output in outputs]

    lengths = run(streamed())
    assert lengths[-1] == (5, ["logits"])
    assert all(not saves for _, saves in lengths[:-1])


def test_an_invoke_is_a_stream_and_several_are_refused(model, run):
    async def one():
        with model.prefill() as tracer:
            with tracer.invoke(P):
                logits = model.logits.save()  # noqa: F841
        return (await tracer.backend).saves["logits"]

    assert run(one()).shape == (1, 1, workload.VOCABULARY)

    async def several():
        with model.prefill() as tracer:
            with tracer.invoke(P):
                logits = model.logits.save()
            with tracer.invoke(P):
                logits = model.logits.save()  # noqa: F841

    with pytest.raises(NotImplementedError, match="single prompt"):
        run(several())


def test_streams_at_once(model, run):
    asked = [one for one in workload.requests(45, 3, slow=False) if one.kind in workload.HEALTHY]

    async def both():
        await workload.install(model)
        alone = await workload.alone(model, asked)
        found = await workload.together(model, asked)
        await model.aclear_edits()
        return alone, found

    problems = [
        f"{request.kind}: {one}"
        for request, expected, found in zip(asked, *run(both()), strict=True)
        for one in workload.differences(expected, found)
    ]
    assert not problems


def long_stream(model):
    with model.decode(P, max_new_tokens=110) as tracer:
        rows = [].save()
        for _ in tracer.iter[0:110]:
            rows.append(model.logits[0, -1])
    return tracer.backend


def unfinished(model):
    return model.vllm_entrypoint.output_processor.get_num_unfinished_requests()


def test_a_stream_left_early_ends_its_request(model, run):
    async def left():
        backend = long_stream(model)
        stream = aiter(backend)
        for _ in range(3):
            await anext(stream)
        assert unfinished(model) == 1
        await stream.aclose()
        # The request itself, not only what the worker holds for it; the backend still lives.
        assert unfinished(model) == 0
        assert await workload.in_flight(model) == 0
        return backend

    run(left())


def test_a_task_that_is_cancelled_ends_its_request(model, run):
    async def cancelled():
        tasks = [asyncio.create_task(drained(long_stream(model))) for _ in range(8)]
        await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        assert unfinished(model) == 0

    run(cancelled())


def test_a_stream_that_nobody_reads_is_no_request(model, run):
    async def unread():
        backend = long_stream(model)
        await asyncio.sleep(0.05)
        assert unfinished(model) == 0
        del backend
        gc.collect()

    run(unread())


def test_cancelled_beside_others(model, run, record):
    async def beside():
        others = [asyncio.create_task(drained(prefilled(model))) for _ in range(6)]
        ends = [asyncio.create_task(drained(long_stream(model))) for _ in range(6)]
        others += [asyncio.create_task(drained(prefilled(model))) for _ in range(6)]
        await asyncio.sleep(0.01)
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
        return await asyncio.gather(*others)

    for output in run(beside()):
        assert_close(
            output.saves["stream"], record.get("layers.1.layer_output"), BOUND, "beside an end"
        )


def test_edits_are_chosen_by_name(model, run, record):
    async def asked(edits):
        with model.prefill(P, edits=edits) as tracer:
            logits = model.logits.save()  # noqa: F841
        return (await tracer.backend).saves

    async def chosen():
        async with model.edit(name="zero"):
            model.layers[1].layer_output[:] = 0
        async with model.edit(name="probe"):
            seen = model.layers[1].layer_output.save()  # noqa: F841
        names = (["zero", "probe"], ["probe"], [])
        found = await asyncio.gather(*(asked(edits) for edits in names))
        plain = await model.generate([{"prompt_token_ids": P}], max_tokens=1, edits=["probe"])
        await model.aclear_edits()
        return *found, plain[0].saves, await asked(None)

    edited, probed, none, plain, cleared = run(chosen())
    stream = record.get("layers.1.layer_output")
    assert not edited["seen"].any()
    assert_close(probed["seen"], stream, BOUND, "what a probe sees")
    assert_close(plain["seen"], stream, BOUND, "what a probe sees without a trace")
    assert none.keys() == cleared.keys() == {"logits"}
    for saves in (probed, none, cleared):
        assert_close(saves["logits"][:, -1], record.get("logits")[:, -1], BOUND, "logits")
    assert not torch.allclose(edited["logits"], none["logits"])


def test_an_edit_that_fails_is_an_error_with_its_line(model, run):
    async def failing(way):
        async with model.edit(name="bad"):
            model.layers[1].layer_output = torch.zeros(1, 1, 1)
        try:
            if way == "generate":
                await model.generate([{"prompt_token_ids": P}], max_tokens=2, edits=["bad"])
            else:
                with model.prefill(P, edits=["bad"]) as tracer:
                    logits = model.logits.save()  # noqa: F841
                await tracer.backend
        finally:
            await model.aclear_edits()

    for way in ("generate", "trace"):
        with pytest.raises(WrongShape) as raised:
            run(failing(way))
        assert "model.layers[1].layer_output = torch.zeros(1, 1, 1)" in lines_here(raised.value)


def lines_here(error):
    return [
        frame.line
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == __file__
    ]


async def out_of_order(model):
    with model.prefill(P) as tracer:
        model.layers[2].layer_output.save()
        model.layers[0].layer_output.save()  # the line
    await tracer.backend


async def wrong_shape(model):
    with model.prefill(P) as tracer:
        model.layers[2].layer_output = torch.zeros(1, 3, 96)  # the line
    await tracer.backend


async def unavailable(model):
    with model.prefill(P) as tracer:
        model.lm_head_output.save()  # the line
    await tracer.backend


async def own_class(model):
    with model.prefill(P) as tracer:
        model.layers[0].layer_output.save()
        raise workload.Mine("here")  # the line
    await tracer.backend


async def no_layer(model):
    with model.prefill(P) as tracer:
        model.layers[99].layer_output.save()  # the line
    await tracer.backend


@pytest.mark.parametrize(
    ("block", "kind"),
    [
        (out_of_order, OutOfOrder),
        (wrong_shape, WrongShape),
        (unavailable, Unavailable),
        (own_class, workload.Mine),
        (no_layer, IndexError),
    ],
)
def test_errors_are_those_of_the_other_engines(model, run, block, kind):
    with pytest.raises(kind) as raised:
        run(block(model))
    assert any("# the line" in line for line in lines_here(raised.value))


def test_bad_prompts_are_refused_at_the_trace(model, run):
    async def asked(prompt):
        with model.prefill(prompt) as tracer:
            logits = model.logits.save()  # noqa: F841
        await tracer.backend

    for prompt in ([], [5] * 400, [10**6]):
        with pytest.raises(ValueError, match="token"):
            run(asked(prompt))

    async def unasked():
        with model.prefill() as tracer:
            logits = model.logits.save()  # noqa: F841
        await tracer.backend

    with pytest.raises(OutsideTrace):
        run(unasked())
