"""Tokenizers: bytes against `str.encode`, tiktoken files and tokenizer.json against the package tokenizers."""

import base64
import json
import random
import unicodedata

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from tests.support.batch_contents import reading_limits
from tests.support.vocabularies import FAMILIES, random_text, real_text, train, write
from torchround.config import DataTable, SourceTable, TokenizerTable
from torchround.data import TokenizerError, build_tokenizer
from torchround.data.opening import open_sources
from torchround.data.text.special_tokens import encode_text, splits_at
from torchround.data.text.tiktoken_file import LLAMA3, QWEN
from torchround.data.text.tokenizer import nfc


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
    reference = train(family, 1000)
    ranks = ranks_of(reference, known.num_ranks)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    lines = (base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(ranks))
    (tmp_path / file).write_bytes(b"\n".join(lines))
    ours, generator = build_tokenizer(TokenizerTable(), tmp_path), random.Random(0)
    texts = real_text() + [random_text(generator) for _ in range(500)]
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


NIGHTLY = pytest.mark.nightly


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Map each family to our tokenizer, read from files, and to the reference that wrote them."""
    found = {}
    for name in FAMILIES:
        folder = tmp_path_factory.mktemp(name)
        reference = write(folder, name)
        found[name] = build_tokenizer(TokenizerTable(path=str(folder))), reference
    return found


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=NIGHTLY)])
def test_real_and_random_text_has_the_tokens_of_the_reference(pairs, name, count):
    ours, reference = pairs[name]
    generator = random.Random(name)
    texts = [*real_text(), *(random_text(generator) for _ in range(count))]
    expected = [encoding.ids for encoding in reference.encode_batch(texts, add_special_tokens=False)]
    assert [ours.encode(text) for text in texts] == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_every_token_keeps_its_id_and_its_text(pairs, name):
    ours, reference = pairs[name]
    assert ours.vocab_size == reference.get_vocab_size()
    for text, number in ours.special.items() | ours.in_text.items():
        assert (reference.token_to_id(text), ours.decode([number])) == (number, text)
    every_id = list(range(reference.get_vocab_size()))
    assert ours.decode(every_id) == reference.decode(every_id, skip_special_tokens=False)


WORDS = ("a", "the", "def", "12345", "x1", "//", "==", "it's", "Ünï", "e\u0301", "中文文字", "<think>", "\u00a0", "...")
GAPS = (" ", " ", "\n", "\n\n", "\n\n\n", "\n    ", "   ", "\t", ".\n", ";\n\n", "\r\n", "\r\n\r\n", "，", ")", "\n/")
PIECES = {
    "paragraphs": "Some words of it.\n\n",
    "lines between paragraphs": "One line\nand another\n\n",
    "Windows lines": "def f():\r\n\r\n    return 1\r\n",
    "indented code": "    if x:\n        y = 12345\n\n",
    "comments": "call();\n// why\n\n/* how */\n",
    "digits": "1234567890" * 40 + "\n",
    "no space": "我能吞下玻璃而不伤身体，",
    "special names": "<|im_start|>user\n\nHi<|im_end|>\n",
}


def ids_in_pieces(ours, text, folder, special=False):
    """Return the ids of a file of text that is read in pieces of 700 bytes, without BOS and EOS."""
    (folder / "x.txt").write_bytes(text.encode())
    table = SourceTable(path=str(folder / "x.txt"), special_tokens=special)
    with reading_limits(PIECE_SIZE=700):
        (source,) = open_sources(DataTable(sources=(table,)), ours)
        (document,), offset, ids = source.first_documents(1), 0, []
        while offset is not None:
            piece, offset = source.read(document, offset)
            ids += encode_text(ours, piece, special).tolist()
    return ids


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_read_in_pieces_has_the_tokens_of_the_whole(pairs, tmp_path, name):
    """Before, GPT-2's pattern met two line ends in a row as one token at the end of a piece."""
    ours = pairs[name][0]
    for case, part in PIECES.items():
        special = case == "special names"
        for shift in (0, 2, 5):
            text = "x" * shift + " " + part * (2500 // len(part))
            assert ids_in_pieces(ours, text, tmp_path, special) == encode_text(ours, text, special).tolist(), case


def test_no_seam_is_where_digits_that_are_counted_from_further_back_would_be_parted_otherwise(tmp_path):
    """Llama 3 takes three digits at once: 7 7 2 and 4 7 7 here. Counted from another place, 2 and 4 are one token."""
    write(tmp_path, "llama3", train("llama3", 300, ("24",)))
    ours, text = build_tokenizer(TokenizerTable(path=str(tmp_path))), "7" * 131 + "24" + "7" * 200
    assert ours.encode(text[:130]) + ours.encode(text[130:]) != ours.encode(text)
    assert not splits_at(ours, text, 130)


@pytest.mark.parametrize("name", [n if n in ("gpt2", "qwen3") else pytest.param(n, marks=NIGHTLY) for n in FAMILIES])
@settings(max_examples=15, deadline=None)
@given(parts=st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(GAPS)), min_size=40, max_size=400))
def test_any_text_read_in_pieces_has_the_tokens_of_the_whole(pairs, tmp_path_factory, name, parts):
    text = "".join(word + gap for word, gap in parts) * 4
    found = ids_in_pieces(pairs[name][0], text, tmp_path_factory.mktemp("pieces"))
    assert found == pairs[name][0].encode(text)


@pytest.mark.parametrize(
    ("name", "bos", "eos", "pad"),
    [
        ("llama3", "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>"),
        ("qwen3", None, "<|endoftext|>", "<|fim_pad|>"),
        ("gpt_oss", None, "<|endoftext|>", "<|endoftext|>"),
    ],
)
def test_documents_are_framed_with_the_vocabularys_own_tokens_for_documents(pairs, name, bos, eos, pad):
    """The end of a document is not the token that ends a turn, which `eos_token` names for chat models."""
    ours, reference = pairs[name]
    assert ours.bos_id == (bos and reference.token_to_id(bos))
    assert (ours.eos_id, ours.pad_id) == (reference.token_to_id(eos), reference.token_to_id(pad))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file["model"].update(type="Unigram"), "its model is 'Unigram'; supported: a byte-level BPE"),
        (lambda file: file["model"].update(dropout=0.1), "its model has dropout 0.1"),
        (lambda file: file["model"]["vocab"].pop("a"), "no token for 'a': it is not byte-level"),
        (
            lambda file: file["model"].update(unk_token="?!") or file["model"]["vocab"].pop("Ā"),
            "unk_token '\\?!' is not in the vocabulary",
        ),
        (
            lambda file: file["pre_tokenizer"]["pretokenizers"].insert(0, {"type": "Digits"}),
            r"has steps \['Digits', 'Split', 'ByteLevel'\]; supported: one Split, or none or Digits before",
        ),
        (lambda file: file["model"]["merges"].reverse(), "ids have to rise"),
        (lambda file: file.update(normalizer={"type": "Lowercase"}), r"normalizer has steps \['Lowercase'\]"),
        (lambda file: [file["added_tokens"].pop(0) for _ in range(3)], "no token ends a document: none of .*, and no"),
        (lambda file: file.update(pre_tokenizer={"type": "Whitespace"}), "does not end in ByteLevel"),
        (lambda file: file["added_tokens"][-1].update(rstrip=True), "'</tool_response>' has rstrip"),
        (
            lambda file: file["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\w+"),
            "pattern leaves out characters",
        ),
    ],
)
def test_a_file_that_would_give_other_tokens_is_refused_and_says_why(tmp_path, pairs, change, message):
    content = json.loads(pairs["qwen3"][1].to_str())
    change(content)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=message) as caught:
        build_tokenizer(TokenizerTable(path=str(path)))
    assert str(path) in str(caught.value)


EVERY = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
MARKS = [text for text in EVERY if unicodedata.combining(text)]


def different(texts):
    """List the texts that the reference normalises otherwise. A line end is no part of any composition."""
    whole = "\n".join(texts)
    pairs = zip(nfc(whole).split("\n"), normalizers.NFC().normalize_str(whole).split("\n"), texts, strict=True)
    return [text for ours, theirs, text in pairs if ours != theirs]


def test_every_character_its_decomposition_and_every_order_of_marks_are_normalised_like_the_reference():
    every = [text for text in EVERY if text != "\n"]
    assert different(every) == []
    # A text of these alone is left as it is without a further look.
    assert different([text for text in every if unicodedata.is_normalized("NFC", text)]) == []
    assert different([text for one in EVERY if (text := unicodedata.normalize("NFD", one)) != one]) == []
    for other in ("\u0334", "\u0301", "\u0345", "\u05b0"):
        for before, after in (("e", other), (f"e{other}", ""), ("e\u0327", other)):
            assert different([before + mark + after for mark in MARKS]) == []


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from(MARKS) | st.characters(codec="utf-8") | st.sampled_from("aeou")))
def test_random_text_with_many_marks_is_normalised_like_the_reference(text):
    assert nfc(text) == nfc(nfc(text)) == normalizers.NFC().normalize_str(text)
