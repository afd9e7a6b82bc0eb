"""Which tokens of a prompt hold a substring, by the tokenizer's offsets."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nnterp.core import token_positions
from nnterp.core.tracing import encode


@pytest.fixture(scope="module")
def plain(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint("llama"))


@pytest.fixture(scope="module")
def adding(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint("llama", add_bos=True))


def _trimming(checkpoint, prefix):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint("llama"))
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(
        trim_offsets=True, add_prefix_space=prefix
    )
    return tokenizer


@pytest.fixture(scope="module")
def trimming(checkpoint):
    """As GPT-2's: the space in front belongs to a token and not to its span."""
    return _trimming(checkpoint, False)


@pytest.fixture(scope="module")
def trimming_prefixed(checkpoint):
    """The same, told that the first space is none of the text's."""
    return _trimming(checkpoint, True)


@pytest.fixture(scope="module")
def words():
    """As Llama 2's: a word's space is a mark of its own, and bytes stand for unknown characters."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁the", "▁city", "▁to", "wer", "s", "▁in", "▁"]
    tokenizer = Tokenizer(
        models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TEXT = "The city by the sea: the café is in the city, 東京 too."


def shown(tokenizer, prompt, positions):
    return tokenizer.decode([encode(prompt, tokenizer)[i] for i in positions])


@pytest.mark.parametrize("name", ["plain", "adding", "trimming"])
@pytest.mark.parametrize(
    "substring", ["sea", "the sea", " by", "by", "é", "東", "東京", ", 東", "."]
)
def test_the_tokens_hold_the_substring_and_lose_it_without_the_first_or_last(
    request, name, substring
):
    tokenizer = request.getfixturevalue(name)
    positions = token_positions(tokenizer, TEXT, substring, occurrence=0)
    assert positions == list(range(positions[0], positions[-1] + 1))
    assert substring in shown(tokenizer, TEXT, positions)
    assert substring not in shown(tokenizer, TEXT, positions[1:])
    assert substring not in shown(tokenizer, TEXT, positions[:-1])


def test_a_special_token_in_front_is_counted_and_never_found(plain, adding):
    for substring in ("The", "T", "city"):
        without = token_positions(plain, TEXT, substring)
        assert token_positions(adding, TEXT, substring) == [i + 1 for i in without]
    assert 0 not in token_positions(adding, TEXT, TEXT)


def test_every_token_of_the_text_is_found_for_the_text_itself(plain):
    assert token_positions(plain, TEXT, TEXT) == list(range(len(encode(TEXT, plain))))


def test_all_occurrences_or_one_of_them(plain):
    every = [token_positions(plain, TEXT, "the", occurrence=i) for i in range(3)]
    assert token_positions(plain, TEXT, "the") == sorted({i for one in every for i in one})
    assert token_positions(plain, TEXT, "the", occurrence=-1) == every[-1]
    assert token_positions(plain, TEXT, "city", occurrence=1) > token_positions(
        plain, TEXT, "city", occurrence=0
    )


def test_occurrences_do_not_overlap(plain):
    assert [token_positions(plain, "zzzzz", "zz", occurrence=i) for i in (0, 1)] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="'zz' is 2 times"):
        token_positions(plain, "zzzzz", "zz", occurrence=2)


def test_characters_of_several_bytes_have_all_of_their_tokens(plain):
    # No merge joins these bytes: two tokens and three, each with its character's span.
    assert len(token_positions(plain, "é", "é")) == 2
    assert len(token_positions(plain, "東京", "東")) == 3
    assert len(token_positions(plain, "a東京b", "京b")) == 4
    assert token_positions(plain, "🙂 ok", "ok")[0] > 3


def test_a_token_that_reaches_beyond_the_substring_counts(plain):
    (the,) = token_positions(plain, "in the city", "the")
    assert plain.decode([encode("in the city", plain)[the]]) == " the"
    assert token_positions(plain, "in the city", "h") == [the]


def test_words_with_marks_and_byte_fallback(words):
    text = "the towers in 東 the city"
    for substring, tokens in {
        "the": ["▁the", "▁the"],
        "towers": ["▁to", "wer", "s"],
        "ower": ["▁to", "wer"],
        "s in": ["s", "▁in"],
        "東": ["<0xE6>", "<0x9D>", "<0xB1>"],
        "city": ["▁city"],
    }.items():
        ids = [encode(text, words)[i] for i in token_positions(words, text, substring)]
        assert words.convert_ids_to_tokens(ids) == tokens


def test_a_chat_is_looked_through_as_its_template_writes_it(adding):
    chat = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "where is the sea?"},
    ]
    found = token_positions(adding, chat, "the sea")
    assert shown(adding, chat, found).strip() == "the sea"
    last = token_positions(adding, chat, "assistant:")
    assert last[-1] == len(encode(chat, adding)) - 1


@pytest.mark.parametrize("name", ["plain", "trimming", "trimming_prefixed"])
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_by_the_length_of_what_is_decoded_before_and_up_to_each_token(request, name, data):
    """The same by another way: tokens of ASCII decode to the text, one after another."""
    plain = request.getfixturevalue(name)
    text = data.draw(st.text(st.sampled_from("the ciyn.aT"), min_size=1, max_size=30))
    start = data.draw(st.integers(0, len(text) - 1))
    substring = text[start : data.draw(st.integers(start + 1, len(text)))]
    ids = encode(text, plain)
    ends = [len(plain.decode(ids[:i])) for i in range(len(ids) + 1)]
    assert ends[-1] == len(text)
    expected, at = set(), text.find(substring)
    while at >= 0:
        stop = at + len(substring)
        expected |= {i for i in range(len(ids)) if ends[i] < stop and at < ends[i + 1]}
        at = text.find(substring, stop)
    assert token_positions(plain, text, substring) == sorted(expected)


@pytest.mark.parametrize(
    ("prompt", "substring", "kind", "match"),
    [
        (TEXT, "river", ValueError, "'river' is not in the prompt 'The city"),
        (TEXT, "", ValueError, "substring is empty"),
        ("", "a", ValueError, "not in the prompt"),
        ([5, 6], "a", TypeError, "not in a list"),
        ({"input_ids": [5, 6]}, "a", TypeError, "not in a dict"),
    ],
)
def test_what_cannot_be_found(plain, prompt, substring, kind, match):
    with pytest.raises(kind, match=match):
        token_positions(plain, prompt, substring)


def test_a_space_outside_of_the_offsets_belongs_to_the_token_that_begins_with_it(trimming, plain):
    for substring in (" ", "  ", "in ", " the", "  the"):
        found = token_positions(trimming, "in  the", substring)
        assert found == token_positions(plain, "in  the", substring)


def test_a_part_that_no_token_holds():
    tokenizer = Tokenizer(models.WordLevel({"in": 0, "the": 1}, unk_token="in"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    dropping = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert token_positions(dropping, "in the", " the") == [1]
    with pytest.raises(ValueError, match="no token of the prompt holds ' '"):
        token_positions(dropping, "in the", " ")


def test_a_checkpoint_without_a_tokenizer(checkpoint, open_model):
    path = checkpoint("llama", tokenizer=False)
    with (
        open_model("hf", path) as model,
        pytest.raises(ValueError, match="has no tokenizer"),
    ):
        token_positions(model, "the sea", "sea")
