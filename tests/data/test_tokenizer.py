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


def filled_up(ranks, num_ranks):
    """Fill up with tokens that occur in no text: a byte that is invalid in UTF-8, and a number."""
    return ranks + [b"\xff" + number.to_bytes(3, "big") for number in range(num_ranks - len(ranks))]


def fabricated_ranks():
    """Make as many tokens as Llama 3 has: bytes, pairs of letters, spaces with letters, then fillers."""
    letters = b"abcdefghijklmnopqrstuvwxyz0123456789 \n."
    ranks = [bytes([byte]) for byte in range(256)]
    ranks += [bytes([first, second]) for first in letters for second in letters]
    ranks += [b" th", b"the", b" the", b"ing", b"abcd", b"\n\n\n", b"123"]
    return filled_up(ranks, LLAMA3.num_ranks)


FABRICATED = {token: rank for rank, token in enumerate(fabricated_ranks())}


def write_ranks(path, ranks):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\n".join(base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(ranks)))


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama3")
    write_ranks(folder / "original" / "tokenizer.model", fabricated_ranks())
    return build_tokenizer(TokenizerTable(), folder)


def merged(piece):
    """Apply byte-pair encoding by its definition: merge the lowest-ranked neighbours first, until none is a token."""
    if piece in FABRICATED:  # taken without merging, as in the released tokenizer
        return [FABRICATED[piece]]
    parts = [piece[index : index + 1] for index in range(len(piece))]
    while True:
        pairs = [FABRICATED.get(parts[index] + parts[index + 1], 1 << 30) for index in range(len(parts) - 1)]
        if not pairs or min(pairs) == 1 << 30:
            return [FABRICATED[part] for part in parts]
        index = pairs.index(min(pairs))
        parts[index : index + 2] = [parts[index] + parts[index + 1]]


@settings(max_examples=40, deadline=None)
@given(text=st.text(st.sampled_from("abcdthein 0123.\n'ü"), max_size=80))
def test_a_llama3_tiktoken_file_encodes_like_merging_one_pair_after_another(llama3, text):
    pieces = regex.findall(LLAMA3.pattern, text)
    assert llama3.encode(text) == [token for piece in pieces for token in merged(piece.encode())]
    assert llama3.decode(llama3.encode(text)) == text


def test_llama3_splits_contractions_digits_by_three_and_line_ends_with_what_is_before_them():
    split = regex.findall(LLAMA3.pattern, "I'LL pay 12345 $x!!\n\n  ok  \n")
    assert split == ["I", "'LL", " pay", " ", "123", "45", " $", "x", "!!\n\n", " ", " ok", "  \n"]


def test_llama3_special_tokens_have_the_ids_of_the_released_model(llama3):
    named = {"<|begin_of_text|>": 128000, "<|end_of_text|>": 128001, "<|finetune_right_pad_id|>": 128004}
    named |= {"<|start_header_id|>": 128006, "<|end_header_id|>": 128007, "<|eom_id|>": 128008, "<|eot_id|>": 128009}
    named |= {"<|python_tag|>": 128010, "<|reserved_special_token_247|>": 128255}
    assert {name: llama3.encoding.encode_single_token(name) for name in named} == named
    assert (llama3.vocab_size, llama3.bos_id, llama3.eos_id, llama3.pad_id) == (128256, 128000, 128001, 128004)


def bytes_of(token):
    """Return the bytes of a token in the alphabet in which `tokenizers` writes byte-level tokens."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return bytes(byte_of[character] for character in token)


@pytest.mark.parametrize(
    ("family", "known", "name"), [("llama3", LLAMA3, "tokenizer.model"), ("qwen3", QWEN, "qwen.tiktoken")]
)
def test_a_tiktoken_file_gives_the_tokens_of_the_reference(tmp_path, family, known, name):
    reference = vocabularies.train(family, 1000)
    added = set(reference.get_added_tokens_decoder())
    by_id = sorted((number, token) for token, number in reference.get_vocab().items() if number not in added)
    assert [number for number, _ in by_id] == list(range(len(by_id)))
    write_ranks(tmp_path / name, filled_up([bytes_of(token) for _, token in by_id], known.num_ranks))
    ours, generator = build_tokenizer(TokenizerTable(path=str(tmp_path))), random.Random(0)
    texts = vocabularies.real_text() + [vocabularies.random_text(generator) for _ in range(500)]
    texts = [text for text in texts if not any(token in text for token in ("<think>", "</tool_call>"))]
    expected = [encoding.ids for encoding in reference.encode_batch(texts, add_special_tokens=False)]
    assert [ours.encode(text) for text in texts] == expected


def test_qwen_added_tokens_have_the_ids_of_the_released_model(tmp_path):
    write_ranks(tmp_path / "qwen.tiktoken", filled_up([bytes([byte]) for byte in range(256)], QWEN.num_ranks))
    qwen = build_tokenizer(TokenizerTable(path=str(tmp_path)))
    named = {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<|video_pad|>": 151656}
    named |= {"<tool_call>": 151657, "<|fim_pad|>": 151662, "</think>": 151668}
    assert {name: qwen.encoding.encode_single_token(name) for name in named} == named
    assert (qwen.vocab_size, qwen.bos_id, qwen.eos_id) == (151669, None, 151643)
    assert qwen.encode("a</think>") == [97, 151668]
    assert 151645 not in qwen.encode("<|im_end|>")
    assert qwen.encode("e\u0301") == list("é".encode())  # NFC


def test_a_tokenizer_file_that_was_replaced_is_read_anew(tmp_path):
    ranks, path = fabricated_ranks(), tmp_path / "tokenizer.model"
    write_ranks(path, ranks)
    assert build_tokenizer(TokenizerTable(path=str(path))).encode("a") == [97]
    write_ranks(path, [ranks[1], ranks[0], *ranks[2:97], ranks[98], ranks[97], *ranks[99:]])
    assert build_tokenizer(TokenizerTable(path=str(path))).encode("a") == [98]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, b"", r"^tokenizer.path: given .*no such file or folder; legal: "),
        ("tokenizer.txt", b"{}", "no tokenizer.json, tokenizer.model or qwen.tiktoken in .*tokenizer.txt"),
        ("tokenizer.json", b"{}", r"not a tokenizer.json \(it lacks 'model'\)"),
        ("tokenizer.json", b"{", r"not a tokenizer.json \(Expecting property name"),
        ("tokenizer.model", b"\x0a\x0e\n\x05<unk>\x15", "not a tiktoken rank file"),
        ("tokenizer.model", b"YQ== zero", "not a tiktoken rank file"),
        ("tokenizer.model", b"YQ== 0\nYg== 1", "2 ranks, not the 128000 of Llama 3 or the 151643 of Qwen"),
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
