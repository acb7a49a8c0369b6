"""tokenizer.json files against the package tokenizers itself: four families' patterns, real and random text."""

import json
import random
import unicodedata

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from tests.support.batch_contents import reading_limits
from tests.support.vocabularies import FAMILIES, random_text, real_text, write
from torchround.config import DataTable, SourceTable, TokenizerTable
from torchround.data import TokenizerError, build_tokenizer
from torchround.data.opening import open_sources
from torchround.data.text.special_tokens import encode_text
from torchround.data.text.tokenizer import NEWER, nfc

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


@pytest.mark.parametrize("name", [n if n in ("gpt2", "qwen3") else pytest.param(n, marks=NIGHTLY) for n in FAMILIES])
@settings(max_examples=15, deadline=None)
@given(parts=st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(GAPS)), min_size=40, max_size=400))
def test_any_text_read_in_pieces_has_the_tokens_of_the_whole(pairs, tmp_path_factory, name, parts):
    text = "".join(word + gap for word, gap in parts) * 4
    found = ids_in_pieces(pairs[name][0], text, tmp_path_factory.mktemp("pieces"))
    assert found == pairs[name][0].encode(text)


def test_special_tokens_in_a_text_are_text_and_added_tokens_are_tokens(pairs):
    ours, reference = pairs["qwen3"]
    ids = ours.encode("a<|im_end|><think>b")
    assert reference.token_to_id("<|im_end|>") not in ids
    assert reference.token_to_id("<think>") in ids
    assert ours.decode(ids) == "a<|im_end|><think>b"


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
    assert different([text for text in EVERY if text != "\n"]) == []
    assert different([text for one in EVERY if (text := unicodedata.normalize("NFD", one)) != one]) == []
    for other in ("\u0334", "\u0301", "\u0345", "\u05b0"):
        for before, after in (("e", other), (f"e{other}", ""), ("e\u0327", other)):
            assert different([before + mark + after for mark in MARKS]) == []


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from(MARKS) | st.characters(codec="utf-8") | st.sampled_from("aeou")))
def test_random_text_with_many_marks_is_normalised_like_the_reference(text):
    assert nfc(text) == nfc(nfc(text)) == normalizers.NFC().normalize_str(text)


def test_marks_of_tables_newer_than_pythons_stay_where_the_reference_leaves_them():
    """Later versions of Python will know these marks and letters of Unicode 15, 16 and newer, which regex has already."""
    every = "".join(EVERY)
    decomposed = normalizers.NFD().normalize_str
    marks = regex.findall(r"\P{Canonical_Combining_Class=0}", every)
    # A mark that the reference knows goes before or after one of these, whichever of the two came first.
    others = "\u0334\u0301\u0345\u05b0\u093c\u3099\u094d\u0f71\u0316\u0321"
    known = {
        mark
        for mark in marks
        if decomposed(mark) != mark or any(decomposed(f"e{o}{mark}") == decomposed(f"e{mark}{o}") for o in others)
    }
    assert len(known) > 800 and {"\U0001e08f", "\U00010efd", "\u0897"} <= set(marks) - known
    assert {mark for mark in marks if NEWER.fullmatch(mark)} == set(marks) - known
    letters = regex.findall(r"\p{Decomposition_Type=Canonical}", every)
    for letter in letters:
        if decomposed(letter) == letter and letter != "\U00011938":  # whose second half is set apart
            assert NEWER.fullmatch(letter), f"{ord(letter):X}"
