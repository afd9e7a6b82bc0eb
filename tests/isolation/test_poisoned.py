"""Buffers that are overwritten once their consumer has run, as kernels of a GPU do.

On the CPU a value served without a copy stays right by luck. Here whatever the engine held at a
place that a block read is filled with a number, as soon as the module after it has run; a second
run is then only right if what was served was the block's own.
"""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import generator
import pytest
import torch
from generator import keys_of
from nnsight.intervention.interleaver import Interleaver
from nnsight.util import apply

from nnterp.core.reading import value_at
from nnterp.core.testing import assert_close
from nnterp.core.tracing._private import Private

P = [5, 17, 250, 9, 33]
POISON = 12345.0
BOUND = 1e-5


@pytest.fixture(scope="module")
def model(only):
    return only("vllm", "llama")


@contextmanager
def poisoned():
    """Fill what was served, when the model has gone on and the step is over."""
    served: list[torch.Tensor] = []
    filled = 0
    handle = Interleaver.handle
    leave = Interleaver.__exit__

    def keep(self, provider, value):
        new = handle(self, provider, value)
        if self.busy and not provider.endswith((".logits", ".samples", "result")):
            for raw in (value, new):
                apply(raw, served.append, torch.Tensor)
        return new

    def poison(self, *error):
        nonlocal filled
        done = leave(self, *error)
        with torch.inference_mode():
            for tensor in served:
                # Weights and tables pass as arguments too; the step's own tensors are floats of
                # as many rows as it has tokens.
                if tensor.is_floating_point() and tensor.dim() == 2 and tensor.shape[0] == len(P):
                    tensor.fill_(POISON)
                    filled += 1
        served.clear()
        return done

    with (
        mock.patch.object(Interleaver, "handle", keep),
        mock.patch.object(Interleaver, "__exit__", poison),
    ):
        yield lambda: filled


def everything(model, keys):
    with model.prefill(P):
        found = {}.save()
        for key in keys:
            found[key] = value_at(model, key)
    return found


def kept(model, keys):
    """The same, each by its own ``save()``, which keeps what the value is at that moment."""
    with model.prefill(P):
        found = {}.save()
        for key in keys:
            found[key] = value_at(model, key).save()
    return found


def wrong(model, keys, record, read):
    with poisoned() as filled:
        found = read(model, keys)
        assert filled() > 50
    bad = []
    for key in keys:
        expected = record.get(key)
        if key == "logits":
            expected = expected[:, -1:]
        try:
            assert_close(found[key], expected, BOUND, key)
        except (AssertionError, ValueError):
            bad.append(key)
    return bad


@pytest.fixture(scope="module")
def keys(model, reference):
    # Integers are not poisoned, and what is computed has storage of its own.
    return [key for key in keys_of(reference("llama"), model) if key != "input_ids"]


@pytest.mark.parametrize("read", [everything, kept])
def test_what_was_read_stays(model, reference, keys, read):
    assert wrong(model, keys, reference("llama").run(P), read) == []


def test_the_model_goes_on_with_what_it_had(model, reference):
    with poisoned(), model.decode(P, max_new_tokens=4):
        for layer in (0, 1, 2):
            model.layers[layer].self_attn.attention_keys.save()
            model.layers[layer].layer_output.save()
        tokens = [].save()
        tokens.append(model.logits)
    record = reference("llama").run(P)
    assert_close(tokens[0][:, -1], record.get("logits")[:, -1], BOUND, "logits")


def test_a_missing_copy_is_seen(model, reference, keys):
    with mock.patch.object(Private, "of", classmethod(generator.aliased)):
        bad = wrong(model, keys, reference("llama").run(P), everything)
    names = {key.rsplit(".", 1)[-1] for key in bad}
    # The sum of two halves is a tensor of its own; the contributions are the model's.
    assert {"attention_output", "mlp_output", "mlp_neurons", "attention_queries"} <= names
