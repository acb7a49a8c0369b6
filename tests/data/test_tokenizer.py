"""Tokenizers: bytes against `str.encode`, and tokenizer.json against the package tokenizers as its files are used elsewhere."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batch_contents import reading_limits
from tests.support.vocabularies import FAMILIES, beginnings, random_text, train, write
from torchround.config import DataTable, SourceTable, TokenizerTable
from torchround.data import TokenizerError, build_tokenizer
from torchround.data.loader import open_sources
from torchround.data.text.tokenizer import encode_text, splits_at


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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (None, b"", r"^tokenizer.path: given .*no such file or folder; legal: "),
        ("tokenizer.model", b"{}", "no tokenizer.json in .*AutoTokenizer.from_pretrained.*save_pretrained"),
        ("tokenizer.json", b"{}", r"not a tokenizer.json \('model'\)"),
        ("tokenizer.json", b"{", r"not a tokenizer.json \(Expecting property name"),
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


BYTE_LEVEL = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
NIGHTLY = pytest.mark.nightly


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    found = {}
    for name in FAMILIES:
        folder = tmp_path_factory.mktemp(name)
        reference = write(folder, name)
        found[name] = build_tokenizer(TokenizerTable(path=str(folder))), reference
    return found


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("count", [100, pytest.param(10_000, marks=NIGHTLY)])
def test_real_and_random_text_has_the_tokens_of_the_reference(pairs, name, count):
    ours, reference = pairs[name]
    generator = random.Random(name)
    texts = [*beginnings(), *(random_text(generator) for _ in range(count))]
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
    (folder / "x.txt").write_bytes(text.encode())
    table = SourceTable(path=str(folder / "x.txt"), special_tokens=special)
    with reading_limits(PIECE_SIZE=700):
        (source,) = open_sources(DataTable(sources=(table,)), ours)
        (document,), offset, ids = source.first_documents(1), 0, []
        while offset is not None:
            begins = offset == 0
            piece, offset = source.read(document, offset)
            ids += encode_text(ours, piece, special, continues=not begins).tolist()
    return ids


@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_read_in_pieces_has_the_tokens_of_the_whole(pairs, tmp_path, name):
    """Before, GPT-2's pattern met two line ends in a row as one token at the end of a piece."""
    ours = pairs[name][0]
    for case, part in PIECES.items():
        special = case == "special names"
        for shift in (0, 2, 5):
            text = "x" * shift + " " + part * (1500 // len(part))
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


def with_step(step):
    return lambda file: file["pre_tokenizer"]["pretokenizers"].insert(0, step)


def step_with(number, **settings):
    return lambda file: file["pre_tokenizer"]["pretokenizers"][number].update(settings)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file["model"].update(type="Unigram"), "its model is 'Unigram' .*supported: .* byte-level BPE"),
        (lambda file: file["model"].update(dropout=0.1), "dropout 0.1; supported: none"),
        (lambda file: file.update(normalizer={"type": "Lowercase"}), r"has normalizers \['Lowercase'\]"),
        (lambda file: [file["added_tokens"].pop(0) for _ in range(3)], "no token ends a document: none of .*, and no"),
        (lambda file: file.update(pre_tokenizer={"type": "Whitespace"}), "its pre_tokenizer has .*Whitespace"),
        (with_step({"type": "WhitespaceSplit"}), "its pre_tokenizer has .*WhitespaceSplit"),
        (with_step({"type": "Metaspace", "replacement": "_"}), "its pre_tokenizer has .*Metaspace"),
        (with_step(BYTE_LEVEL | {"add_prefix_space": True}), "without a step that puts a space"),
        (step_with(1, add_prefix_space=True), "without a step that puts a space"),
        (step_with(0, behavior="Removed"), "its pre_tokenizer has .*Removed"),
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


@pytest.mark.parametrize(
    "ignored",
    [
        {"truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}},
        {"decoder": None},
    ],
)
def test_limits_that_a_file_sets_for_other_programs_and_a_missing_decoder_change_nothing(tmp_path, pairs, ignored):
    content = json.loads(pairs["qwen3"][1].to_str()) | ignored
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    text = "more than three tokens of wörds, and <|im_end|> as text"
    ours = build_tokenizer(TokenizerTable(path=str(tmp_path)))
    assert ours.encode(text) == pairs["qwen3"][0].encode(text) and ours.decode(ours.encode(text)) == text
    assert ours.special["<|im_end|>"] not in ours.encode(text)
