"""tokenizer.json files against the package tokenizers itself: four families' patterns, real and random text."""

import json
import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public

from tests.support import vocabularies
from tests.support.vocabularies import FAMILIES, random_text, real_text, train, write
from torchround.config import DataTable, SourceTable, TokenizerTable
from torchround.data import Tokenizer, TokenizerError, build_tokenizer
from torchround.data.formats import source_files
from torchround.data.opening import open_sources
from torchround.data.text.special_tokens import encode_text

Pair = tuple[Tokenizer, tokenizers.Tokenizer]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Map each family to our tokenizer, read from files, and to the reference that wrote them."""
    found = {}
    for name in FAMILIES:
        folder = tmp_path_factory.mktemp(name)
        reference = write(folder, name)
        found[name] = build_tokenizer(TokenizerTable(path=str(folder))), reference
    return found


def ids_of(reference: tokenizers.Tokenizer, text: str) -> list[int]:
    """Return the ids of text in which no special token occurs."""
    ids: list[int] = reference.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize("name", FAMILIES)
def test_real_text_has_the_tokens_of_the_reference(pairs: dict[str, Pair], name: str) -> None:
    ours, reference = pairs[name]
    for text in real_text():
        assert ours.encode(text) == ids_of(reference, text)


@pytest.mark.parametrize("name", FAMILIES)
def test_10000_random_strings_have_the_tokens_of_the_reference(pairs: dict[str, Pair], name: str) -> None:
    ours, reference = pairs[name]
    generator = random.Random(name)
    texts = [random_text(generator) for _ in range(10_000)]
    expected = [encoding.ids for encoding in reference.encode_batch(texts, add_special_tokens=False)]
    assert [ours.encode(text) for text in texts] == expected


@pytest.mark.parametrize("name", FAMILIES)
def test_random_strings_between_special_tokens_have_the_tokens_of_the_reference(
    pairs: dict[str, Pair], name: str
) -> None:
    """The tokenizer sees special tokens apart from text, as in a rendered chat. 10,000 strings over all families."""
    ours, reference = pairs[name]
    generator, special = random.Random(name), list(FAMILIES[name].special)
    dialogues = [
        [random_text(generator), generator.choice(special), random_text(generator), generator.choice(special)]
        for _ in range(2_500)
    ]
    texts = ["".join(parts) for parts in dialogues]
    expected = [encoding.ids for encoding in reference.encode_batch(texts, add_special_tokens=False)]
    for parts, ids in zip(dialogues, expected, strict=True):
        found = [[ours.special_id(part)] if index % 2 else ours.encode(part) for index, part in enumerate(parts)]
        assert list(chain.from_iterable(found)) == ids


def test_gpt_oss_has_the_pattern_and_the_special_tokens_of_o200k_harmony(
    pairs: dict[str, Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *args, **options: {})  # a download
    harmony = openai_public.o200k_harmony()
    assert vocabularies.GPT_OSS == harmony["pat_str"] == pairs["gpt_oss"][0].encoding._pat_str
    assert set(FAMILIES["gpt_oss"].special) <= harmony["special_tokens"].keys()


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(codec="utf-8"), max_size=60))
def test_any_text_has_the_tokens_of_the_reference(pairs: dict[str, Pair], name: str, text: str) -> None:
    # Hypothesis also tries strings of the source code, special tokens among them, which only the reference recognises.
    assume(not any(special in text for special in FAMILIES[name].special))
    ours, reference = pairs[name]
    assert ours.encode(text) == ids_of(reference, text)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_token_keeps_its_id_and_its_text(pairs: dict[str, Pair], name: str) -> None:
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


def ids_in_pieces(ours: Tokenizer, text: str, folder: Path, special: bool = False) -> list[int]:
    """Return the ids of a file of text that is read in pieces of 700 bytes, without BOS and EOS."""
    (folder / "x.txt").write_bytes(text.encode())
    table = SourceTable(path=str(folder / "x.txt"), special_tokens=special)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source_files, "PIECE_SIZE", 700)
        (source,) = open_sources(DataTable(sources=(table,)), ours)
        (document,), offset, ids = source.first_documents(1), 0, []
        while offset is not None:
            piece, offset = source.read(document, offset)
            ids += encode_text(ours, piece, special).tolist()
    return ids


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("case", PIECES)
def test_a_text_read_in_pieces_has_the_tokens_of_the_whole(
    pairs: dict[str, Pair], tmp_path: Path, name: str, case: str
) -> None:
    """Before, GPT-2's pattern met two line ends in a row as one token at the end of a piece."""
    special = case == "special names"
    for shift in range(7):
        text = "x" * shift + " " + PIECES[case] * (4000 // len(PIECES[case]))
        whole = encode_text(pairs[name][0], text, special).tolist()
        assert ids_in_pieces(pairs[name][0], text, tmp_path, special) == whole


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(parts=st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(GAPS)), min_size=40, max_size=400))
def test_any_text_read_in_pieces_has_the_tokens_of_the_whole(
    pairs: dict[str, Pair], tmp_path_factory: pytest.TempPathFactory, name: str, parts: list[tuple[str, str]]
) -> None:
    text = "".join(word + gap for word, gap in parts) * 4
    found = ids_in_pieces(pairs[name][0], text, tmp_path_factory.mktemp("pieces"))
    assert found == pairs[name][0].encode(text)


def test_special_tokens_in_a_text_are_text_and_added_tokens_are_tokens(pairs: dict[str, Pair]) -> None:
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
def test_documents_are_framed_with_the_vocabularys_own_tokens_for_documents(
    pairs: dict[str, Pair], name: str, bos: str | None, eos: str, pad: str
) -> None:
    """The end of a document is not the token that ends a turn, which `eos_token` names for chat models."""
    ours, reference = pairs[name]
    assert ours.bos_id == (bos and reference.token_to_id(bos))
    assert (ours.eos_id, ours.pad_id) == (reference.token_to_id(eos), reference.token_to_id(pad))


Change = Callable[[dict[str, Any]], Any]


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
        (lambda file: file.update(pre_tokenizer={"type": "Whitespace"}), "does not end in ByteLevel"),
        (lambda file: file["added_tokens"][-1].update(rstrip=True), "'</tool_response>' has rstrip"),
        (
            lambda file: file["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\w+"),
            "pattern leaves out characters",
        ),
    ],
)
def test_a_file_that_would_give_other_tokens_is_refused_and_says_why(
    tmp_path: Path, pairs: dict[str, Pair], change: Change, message: str
) -> None:
    content = json.loads(pairs["qwen3"][1].to_str())
    change(content)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=message) as caught:
        build_tokenizer(TokenizerTable(path=str(path)))
    assert str(path) in str(caught.value)


def test_a_vocabulary_without_a_token_that_ends_documents_is_refused(tmp_path: Path) -> None:
    reference = train("llama3", 300, text=["abc"])
    content = json.loads(reference.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if "end_of_text" not in token["content"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=r"no token ends a document: none of .*, and no eos_token in"):
        build_tokenizer(TokenizerTable(path=str(tmp_path)))
