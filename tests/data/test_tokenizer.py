"""The byte tokenizer against `str.encode`; tiktoken files against merges done one by one, and the package tokenizers."""

import base64
import random

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import vocabularies
from torchround.config import TokenizerTable
from torchround.data import TokenizerError, build_tokenizer
from torchround.data.text.tiktoken_file import LLAMA3, QWEN


@settings(max_examples=40, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=200))
def test_bytes_has_one_token_per_utf8_byte_and_decodes_to_the_text(tokenizer, text):
    assert tokenizer.encode(text) == tokenizer.encode_array(text).tolist() == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_of_bytes_are_above_the_bytes_and_no_text_gives_them(tokenizer):
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (256, 257, 258, 259)
    assert tokenizer.encode_array("<|eos|>").tolist() == tokenizer.encode("<|eos|>") == list(b"<|eos|>")


def test_a_lone_surrogate_becomes_the_replacement_character(tokenizer):
    assert tokenizer.encode_array("a\ud800b").tolist() == list("a\ufffdb".encode())


def bytes_of(token):
    """Return the bytes of a token in the alphabet in which `tokenizers` writes byte-level tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return bytes(byte_of[character] for character in token)


def ranks_of(reference, num_ranks):
    """List a vocabulary's tokens by rank. Fill up with an invalid byte and a number, which occur in no text."""
    added = set(reference.get_added_tokens_decoder())
    by_id = sorted((number, token) for token, number in reference.get_vocab().items() if number not in added)
    assert [number for number, _ in by_id] == list(range(len(by_id)))
    ranks = [bytes_of(token) for _, token in by_id]
    return ranks + [b"\xff" + number.to_bytes(3, "big") for number in range(num_ranks - len(ranks))]


LLAMA3_IDS = {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|finetune_right_pad_id|>": 128004}
LLAMA3_IDS |= {"<|start_header_id|>": 128006, "<|end_header_id|>": 128007, "<|eom_id|>": 128008, "<|eot_id|>": 128009}
LLAMA3_IDS |= {"<|python_tag|>": 128010, "<|reserved_special_token_247|>": 128255}
QWEN_IDS = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<|video_pad|>": 151656}
QWEN_IDS |= {"<tool_call>": 151657, "<|fim_pad|>": 151662, "</think>": 151668}


@pytest.mark.parametrize(
    ("family", "known", "file", "ids", "framing"),
    [
        ("llama3", LLAMA3, "original/tokenizer.model", LLAMA3_IDS, (128256, 128000, 128001)),
        ("qwen3", QWEN, "qwen.tiktoken", QWEN_IDS, (151669, None, 151643)),
    ],
)
def test_a_tiktoken_file_gives_the_tokens_of_the_reference(tmp_path, family, known, file, ids, framing):
    """The special tokens have the ids of the released model."""
    reference = vocabularies.train(family, 1000)
    ranks = ranks_of(reference, known.num_ranks)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    lines = (base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(ranks))
    (tmp_path / file).write_bytes(b"\n".join(lines))
    ours, generator = build_tokenizer(TokenizerTable(), tmp_path), random.Random(0)
    texts = vocabularies.real_text() + [vocabularies.random_text(generator) for _ in range(500)]
    texts = [text for text in texts if not any(token in text for token in ("<think>", "</tool_call>"))]
    expected = [encoding.ids for encoding in reference.encode_batch(texts, add_special_tokens=False)]
    assert [ours.encode(text) for text in texts] == expected
    assert all(ours.decode(tokens) == text for tokens, text in zip(expected[:6], texts, strict=False))
    assert {name: ours.encoding.encode_single_token(name) for name in ids} == ids
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == framing
    assert not set(ours.encode("<|im_end|><|eot_id|>")) & {*ids.values()}
    if family == "qwen3":
        assert ours.encode("a</think>") == [*ours.encode("a"), 151668]


def test_llama3_splits_contractions_digits_by_three_and_line_ends_with_what_is_before_them():
    split = regex.findall(LLAMA3.pattern, "I'LL pay 12345 $x!!\n\n  ok  \n")
    assert split == ["I", "'LL", " pay", " ", "123", "45", " $", "x", "!!\n\n", " ", " ok", "  \n"]


def test_a_tokenizer_file_that_was_replaced_is_read_anew(tmp_path):
    for count in (1, 2):
        (tmp_path / "tokenizer.model").write_text("YQ== 0\nYg== 1\n"[: 7 * count])
        with pytest.raises(TokenizerError, match=f"{count} ranks, not the 128000 of Llama 3 or the 151643 of Qwen"):
            build_tokenizer(TokenizerTable(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, b"", r"^tokenizer.path: given .*no such file or folder; legal: "),
        ("tokenizer.txt", b"{}", "no tokenizer.json, tokenizer.model or qwen.tiktoken in .*tokenizer.txt"),
        ("tokenizer.json", b"{}", r"not a tokenizer.json \(it lacks 'model'\)"),
        ("tokenizer.json", b"{", r"not a tokenizer.json \(Expecting property name"),
        ("tokenizer.model", b"\x0a\x0e\n\x05<unk>\x15", "not a tiktoken rank file"),
        ("tokenizer.model", b"YQ== zero", "not a tiktoken rank file"),
    ],
)
def test_an_unusable_tokenizer_is_named_with_what_is_supported(tmp_path, name, content, message):
    if name:
        (tmp_path / "tok").mkdir()
        (tmp_path / "tok" / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=message) as caught:
        build_tokenizer(TokenizerTable(path=str(tmp_path / "tok")))
    assert str(tmp_path / "tok") in str(caught.value)


def test_no_tokenizer_at_all_says_which_keys_give_one():
    with pytest.raises(TokenizerError, match=r"tokenizer.path, tokenizer.name or model.hf_path"):
        build_tokenizer(TokenizerTable())
