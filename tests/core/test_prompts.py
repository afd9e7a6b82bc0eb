"""Token ids of a prompt: one function for both engines, for every form that a prompt may have."""

from __future__ import annotations

import numpy
import pytest
import torch
from transformers import AutoTokenizer

from nnterp.core.tracing import encode, is_chat

BOS = 0
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello there"},
]


@pytest.fixture(scope="module")
def plain(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint("llama"))


@pytest.fixture(scope="module")
def adding(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint("llama", add_bos=True))


IDS = {
    "list": [5, 6, 7],
    "tuple": (5, 6, 7),
    "tensor": torch.tensor([5, 6, 7]),
    "tensor of int32": torch.tensor([5, 6, 7], dtype=torch.int32),
    "row": torch.tensor([[5, 6, 7]]),
    "list of one list": [[5, 6, 7]],
    "array": numpy.array([5, 6, 7]),
    "row of an array": numpy.array([[5, 6, 7]]),
    "list of numpy's integers": list(numpy.array([5, 6, 7])),
    "output": {"input_ids": [5, 6, 7]},
    "output of a row": {"input_ids": [[5, 6, 7]], "attention_mask": [[1, 1, 1]]},
    "output of tensors": {"input_ids": torch.tensor([[5, 6, 7]])},
    "padded output": {
        "input_ids": torch.tensor([[2, 2, 5, 6, 7]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1]]),
    },
}


@pytest.mark.parametrize("prompt", IDS.values(), ids=IDS)
def test_ids_are_taken_as_they_are(prompt, adding):
    for tokenizer in (None, adding):
        found = encode(prompt, tokenizer)
        assert found == [5, 6, 7]
        assert [type(token) for token in found] == [int] * 3


def test_one_id(plain):
    assert encode([5], plain) == encode(torch.tensor(5), plain) == [5]


def test_text_has_the_special_tokens_that_its_tokenizer_adds(plain, adding):
    assert encode("hello there", plain) == plain("hello there")["input_ids"]
    assert encode("hello there", plain)[0] != BOS
    assert encode("hello there", adding) == [BOS, *encode("hello there", plain)]


def test_a_tokenizers_output_is_what_it_is(plain, adding):
    for tokenizer in (plain, adding):
        expected = tokenizer("hello there")["input_ids"]
        assert encode(tokenizer("hello there"), tokenizer) == expected
        assert encode(tokenizer("hello there", return_tensors="pt"), tokenizer) == expected


def test_padding_of_a_tokenizers_output_is_dropped_on_either_side(plain):
    for side in ("left", "right"):
        plain.padding_side = side
        output = plain("hello", padding="max_length", max_length=12, return_tensors="pt")
        assert output["input_ids"].shape == (1, 12)
        assert encode(output, plain) == plain("hello")["input_ids"]


def test_a_chat_goes_through_its_template_with_the_generation_prompt(plain):
    text = plain.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    without = plain.apply_chat_template(CHAT, tokenize=False)
    assert text != without
    assert encode(CHAT, plain) == plain(text, add_special_tokens=False)["input_ids"]
    assert encode(tuple(CHAT), plain) == encode(CHAT, plain)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("template_has_bos", [True, False])
def test_a_chat_never_begins_with_two_beginnings(plain, adding, adds, template_has_bos):
    """A template writes its own, and then the tokenizer adds none."""
    tokenizer = adding if adds else plain
    body = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }} {% endfor %}"
    kept = tokenizer.chat_template
    tokenizer.chat_template = ("{{ bos_token }}" if template_has_bos else "") + body
    try:
        ids = encode(CHAT, tokenizer)
    finally:
        tokenizer.chat_template = kept
    assert ids.count(BOS) == (1 if template_has_bos else 0)
    assert (ids[0] == BOS) == template_has_bos


def test_what_is_a_chat():
    assert is_chat(CHAT)
    assert is_chat(tuple(CHAT))
    assert not is_chat([])
    assert not is_chat("text")
    assert not is_chat([5, 6])
    assert not is_chat([{"content": "no role"}])
    assert not is_chat({"role": "user", "content": "one message alone"})


@pytest.mark.parametrize(
    "prompt",
    ["", [], (), torch.empty(0, dtype=torch.long), {"input_ids": []}, [[]], numpy.array([], int)],
    ids=["text", "list", "tuple", "tensor", "output", "row", "array"],
)
def test_an_empty_prompt(prompt, adding):
    with pytest.raises(ValueError, match="prompt is empty"):
        encode(prompt, adding)


def test_a_prompt_of_padding_alone_is_empty(plain):
    with pytest.raises(ValueError, match="prompt is empty"):
        encode({"input_ids": [2, 2], "attention_mask": [0, 0]}, plain)


@pytest.mark.parametrize(
    "prompt",
    [[[5, 6], [7]], torch.tensor([[5, 6], [7, 8]]), {"input_ids": [[5], [6]]}],
    ids=["lists", "tensor", "output"],
)
def test_several_prompts_are_one_each(prompt, plain):
    with pytest.raises(ValueError, match="one prompt at a time, not 2"):
        encode(prompt, plain)


@pytest.mark.parametrize(
    "prompt",
    [None, 5.0, object(), [1.5], ["a", "b"], [True], torch.zeros(3), {"ids": [5]}, {5, 6}],
    ids=["nothing", "number", "object", "floats", "texts", "bools", "float tensor", "map", "set"],
)
def test_what_is_no_prompt(prompt, plain):
    with pytest.raises(TypeError):
        encode(prompt, plain)


@pytest.mark.parametrize("prompt", ["text", CHAT], ids=["text", "chat"])
def test_text_without_a_tokenizer_says_what_is_missing(prompt):
    with pytest.raises(ValueError, match=r"has no tokenizer.*token ids.*tokenizer="):
        encode(prompt, None)
