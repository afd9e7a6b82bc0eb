"""Gradients of standard values on transformers, against plain torch autograd."""

from __future__ import annotations

import pytest
import torch

from nnterp.core.testing import assert_close

P = [5, 17, 250, 9, 33]
LONG = list(range(30, 43))
BOUND = 1e-4


@pytest.fixture(scope="module", params=["eager", "sdpa"])
def attention(request):
    return request.param


@pytest.fixture(scope="module")
def model(only, attention):
    return only("hf", "llama", attn_implementation=attention)


@pytest.fixture(scope="module")
def plain(checkpoint, attention):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        checkpoint("llama"), attn_implementation=attention
    ).eval()


def expected_gradients(plain, ids, layer=1, edit=None):
    """What autograd gives, of a plain module with hooks that keep what passes."""
    kept = {}

    def keep(name, index=None):
        def hook(module, args, output):
            value = output[0] if isinstance(output, tuple) else output
            if edit is not None and name == edit[0]:
                value = edit[1](value)
            value.retain_grad()
            kept[name] = value
            return (value, *output[1:]) if isinstance(output, tuple) else value

        return hook

    def keep_input(name):
        def hook(module, args):
            args[0].retain_grad()
            kept[name] = args[0]

        return hook

    block = plain.model.layers[layer]
    handles = [
        plain.model.embed_tokens.register_forward_hook(keep("token_embeddings")),
        block.register_forward_hook(keep("layer_output")),
        block.self_attn.register_forward_hook(keep("attention_output")),
        block.mlp.register_forward_hook(keep("mlp_output")),
        block.mlp.down_proj.register_forward_pre_hook(keep_input("mlp_neurons")),
        plain.model.norm.register_forward_hook(keep("final_norm_output")),
    ]
    try:
        logits = plain(torch.tensor([ids])).logits
        logits.retain_grad()
        logits[:, -1].logsumexp(-1).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
        plain.zero_grad()
    kept["logits"] = logits
    return {name: value.grad for name, value in kept.items()}


def test_gradients_are_those_of_plain_autograd(model, plain):
    expected = expected_gradients(plain, P)
    with model.prefill(P):
        embedded = model.token_embeddings
        attention = model.layers[1].self_attn.attention_output
        neurons = model.layers[1].mlp.mlp_neurons
        mlp = model.layers[1].mlp.mlp_output
        stream = model.layers[1].layer_output
        normed = model.final_norm_output
        logits = model.logits
        loss = logits[:, -1].logsumexp(-1).sum()
        with loss.backward():
            found = {}.save()
            found["logits"] = logits.grad
            found["final_norm_output"] = normed.grad
            found["layer_output"] = stream.grad
            found["mlp_output"] = mlp.grad
            found["mlp_neurons"] = neurons.grad
            found["attention_output"] = attention.grad
            found["token_embeddings"] = embedded.grad
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert_close(gradient, expected[name], BOUND, name)


def test_gradients_of_the_inside_of_an_attention(model, attention):
    """By finite differences: what the loss changes by along the gradient."""
    names = ["attention_queries", "attention_keys", "attention_values"]
    if attention == "eager":
        names.append("attention_probabilities")
    names.append("attention_head_outputs")
    for name in names:
        with model.prefill(P):
            value = getattr(model.layers[1].self_attn, name)
            loss = model.logits[:, -1].logsumexp(-1).sum()
            with loss.backward():
                gradient = value.grad.clone().save()
        losses = []
        step = 1e-2 * gradient / gradient.norm()
        for sign in (1, -1):
            with model.prefill(P):
                getattr(model.layers[1].self_attn, name)[:] += sign * step
                moved = model.logits[:, -1].logsumexp(-1).sum().save()
            losses.append(moved.item())
        slope = (losses[0] - losses[1]) / 2e-2
        assert slope == pytest.approx(gradient.norm().item(), rel=2e-2), name


def test_a_saved_value_has_its_gradient_too(model, plain):
    expected = expected_gradients(plain, P)["layer_output"]
    with model.prefill(P):
        stream = model.layers[1].layer_output.save()
        loss = model.logits[:, -1].logsumexp(-1).sum()
        with loss.backward():
            gradient = stream.grad.save()
    assert_close(gradient, expected, BOUND, "layer_output")
    assert type(stream) is torch.Tensor


def test_gradients_of_each_invoke_are_of_its_own_rows(model, plain):
    with model.prefill() as tracer:
        for ids in (P, LONG):
            with tracer.invoke(ids):
                stream = model.layers[1].layer_output
                loss = model.logits[:, -1].logsumexp(-1).sum()
                with loss.backward(retain_graph=True):
                    gradient = stream.grad.save()
    for found, ids in zip(gradient, (P, LONG), strict=True):
        assert tuple(found.shape) == (1, len(ids), 96)
        expected = expected_gradients(plain, ids)["layer_output"]
        assert_close(found, expected, BOUND, f"{len(ids)} tokens")


def test_gradients_flow_through_an_edit(model, plain):
    """Doubling an output doubles what flows back through it."""
    expected = expected_gradients(plain, P, edit=("mlp_output", lambda value: value * 2))
    for in_place in (False, True):
        with model.prefill(P):
            neurons = model.layers[1].mlp.mlp_neurons
            if in_place:
                model.layers[1].mlp.mlp_output.mul_(2)
            else:
                model.layers[1].mlp.mlp_output = model.layers[1].mlp.mlp_output * 2
            loss = model.logits[:, -1].logsumexp(-1).sum()
            with loss.backward():
                gradient = neurons.grad.save()
        assert_close(gradient, expected["mlp_neurons"], BOUND, f"in place: {in_place}")


def test_the_gradient_of_what_was_assigned(model):
    """A leaf of the caller's, such as a vector that is being learned."""
    vector = torch.zeros(96, requires_grad=True)
    with model.prefill(P):
        model.layers[1].layer_output = model.layers[1].layer_output + vector
        loss = model.logits[:, -1].logsumexp(-1).sum().save()
    loss.backward()
    with model.prefill(P):
        stream = model.layers[1].layer_output
        again = model.logits[:, -1].logsumexp(-1).sum()
        with again.backward():
            expected = stream.grad.save()
    assert_close(vector.grad, expected.sum((0, 1)), BOUND, "the vector's")


def test_steering_with_a_vector_that_is_learned(model):
    vector = torch.zeros(96, requires_grad=True)
    with model.prefill(P):
        model.steer(1, vector)
        loss = model.logits[:, -1].logsumexp(-1).sum().save()
    loss.backward()
    assert vector.grad is not None
    assert vector.grad.abs().max() > 0


def test_parameters_get_their_gradients_from_a_saved_loss(model, plain):
    model._module.zero_grad()
    plain.zero_grad()
    with model.prefill(P):
        _ = model.layers[1].layer_output
        loss = model.logits[:, -1].logsumexp(-1).sum().save()
    loss.backward()
    plain(torch.tensor([P])).logits[:, -1].logsumexp(-1).sum().backward()
    weight = model.layers[0].mlp.down_proj._module.weight
    expected = plain.model.layers[0].mlp.down_proj.weight
    assert_close(weight.grad, expected.grad, BOUND, "a weight's")
    model._module.zero_grad()
    plain.zero_grad()


def test_reading_under_gradients_leaves_the_logits_bit_equal(model, plain):
    with torch.no_grad():
        expected = plain(torch.tensor([P])).logits
    with model.prefill(P):
        for layer in model.layers:
            _ = layer.layer_input
            _ = layer.self_attn.attention_output
            _ = layer.mlp.mlp_output
            _ = layer.layer_output
        logits = model.logits.save()
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_values_are_read_and_edited_all_the_same(model, plain, mode):
    with torch.no_grad():
        expected = plain(torch.tensor([P])).logits
    with mode(), model.prefill(P):
        before = model.layers[1].layer_output.save()
        logits = model.logits.save()
    assert torch.equal(logits, expected)
    assert not logits.requires_grad
    with mode(), model.prefill(P):
        stream = model.layers[1].layer_output
        kept = stream.save()
        stream[:] = 0
        entering = model.layers[2].layer_input.save()
        edited = model.logits.save()
    assert torch.equal(kept, before)
    assert not entering.any()
    assert not torch.equal(edited, expected)
    # What comes out is an ordinary tensor, which may be edited and enter a graph.
    kept += 1
    (kept * torch.ones(96, requires_grad=True)).sum().backward()


def test_under_inference_mode_an_edit_of_one_of_two_prompts(model):
    with torch.inference_mode(), model.prefill() as tracer:
        with tracer.invoke(P):
            model.layers[1].layer_output[:, -1] = 0
            stream = model.layers[2].layer_input.save()
        with tracer.invoke(LONG):
            stream = model.layers[2].layer_input.save()
    assert not stream[0][:, -1].any()
    assert stream[0][:, :-1].any()
    assert stream[1].abs().amax(-1).min() > 0
