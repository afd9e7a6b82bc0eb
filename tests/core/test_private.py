"""The copy that a block is handed: a tensor like any other, whose edits are seen."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch

from nnterp.core.tracing import released
from nnterp.core.tracing._private import Private, clone, plain


@pytest.fixture(params=["plain", "gradients", "inference"])
def value(request):
    raw = torch.arange(12.0).reshape(3, 4)
    if request.param == "gradients":
        raw = (raw.requires_grad_() * 1).clone()
    with torch.inference_mode(request.param == "inference"):
        yield raw if request.param != "inference" else raw.clone()


@pytest.fixture
def private(value):
    return Private.of(value)


def test_it_is_a_copy_of_its_own(value, private):
    assert torch.equal(plain(private), value)
    assert private.data_ptr() != value.data_ptr()
    assert private.shape == (3, 4)
    assert private.requires_grad == value.requires_grad
    assert not private.edited


def test_operations_give_plain_tensors(private):
    for found in (private + 1, private[0], private.T, private.sum(), torch.cat([private] * 2)):
        assert type(found) is torch.Tensor
    assert type(plain(private)) is torch.Tensor
    assert not private.edited


@pytest.mark.parametrize(
    "edit",
    [
        lambda v: v.mul_(2),
        lambda v: v.__setitem__((0, 0), 9),
        lambda v: v[1].zero_(),
        lambda v: v.view(-1).add_(1),
        lambda v: v.detach().fill_(3),
        lambda v: torch.add(v, 1, out=v),
        lambda v: v.copy_(torch.ones(3, 4)),
    ],
    ids=["method", "setitem", "row", "view", "detached", "out", "copy_"],
)
def test_edits_in_place_are_seen(private, edit):
    with torch.no_grad():
        edit(private)
    assert private.edited


def test_what_gives_the_storage_out_may_be_an_edit(private):
    _ = private.detach().numpy()
    assert private.edited
    with pytest.raises(TypeError, match="assign the value itself"):
        private.data = torch.ones(3, 4)


def test_a_clone_counts_its_versions_under_inference_mode_too():
    with torch.inference_mode():
        found = clone(torch.ones(2))
        before = found._version
        found += 1
        assert found._version == before + 1


def test_it_travels_as_a_plain_tensor(private):
    there = pickle.loads(pickle.dumps(plain(private).detach()))
    assert torch.equal(there, plain(private))
    if not private.requires_grad:
        assert type(pickle.loads(pickle.dumps(private))) is torch.Tensor
        assert type(copy.deepcopy(private)) is torch.Tensor
        buffer = io.BytesIO()
        torch.save(private, buffer)
        buffer.seek(0)
        assert type(torch.load(buffer)) is torch.Tensor


def test_released_gives_plain_tensors_and_keeps_containers(private):
    rows = [private, (private, {"a": private}), "text"]
    assert released(rows) is rows
    assert type(rows[0]) is type(rows[1][0]) is type(rows[1][1]["a"]) is torch.Tensor
    assert rows[2] == "text"
    looped: list = [private]
    looped.append(looped)
    assert released(looped) is looped
    assert type(looped[0]) is torch.Tensor
    untouched = (1, [2], {"b": 3})
    assert released(untouched) is untouched
