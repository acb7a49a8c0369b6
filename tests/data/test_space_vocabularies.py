"""Tokenizers that write spaces as `▁` against the package tokenizers, which reads each text and each conversation as a whole."""

import json
import random

import pytest
import tokenizers

from tests.data.test_tokenizer import PIECES, ids_in_pieces
from tests.support.conversations import answer, question
from tests.support.space_vocabularies import KINDS, space_tokenizer, write_kind
from tests.support.vocabularies import beginnings, random_text
from torchround.config import SourceTable, TokenizerTable
from torchround.data import TokenizerError, build_tokenizer
from torchround.data.document_types import Conversation, Document
from torchround.data.formats.content import RecordReader
from torchround.data.reading_order import DocumentPiece
from torchround.data.text.chat import ChatTemplate
from torchround.data.text.tokenizer import encode_text
from torchround.data.tokenising import tokenise

EACH = pytest.mark.parametrize("kind", KINDS)
SPACES = ("", " ", "  a", "a ", "▁", "▁a▁", "\n\n\nb", "\u00a0x")
HARD = (*SPACES, "é e\u0301", "🙂👩‍🚀", "\x00", "<0x0A>", "a <tool> b", "<tool>c")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folders = {kind: write_kind(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}
    return {
        kind: (build_tokenizer(TokenizerTable(path=str(folder))), reference_of(kind))
        for kind, folder in folders.items()
    }


def reference_of(kind, special=False):
    """Return the library's own, for which names of special tokens are text unless `special`."""
    reference = tokenizers.Tokenizer.from_str(space_tokenizer(kind).to_str())
    reference.encode_special_tokens = not special
    return reference


@EACH
def test_text_has_the_tokens_of_the_reference_and_decodes_as_there(pairs, kind):
    ours, reference = pairs[kind]
    generator = random.Random(kind)
    for text in (*HARD, *beginnings(), *(random_text(generator) for _ in range(100))):
        ids = reference.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids, text
        decoded = ours.decode(ids)
        assert decoded == reference.decode(ids, skip_special_tokens=False), text
        start = ids[:50]
        for cut in range(1, min(len(start), 9)):  # as samples are shown: what follows a prompt keeps its space
            parts = ours.decode(start[:cut]) + ours.decode_after(start[:cut], start[cut:])
            own_space = start[cut - 1] in (ours.in_text["<tool>"], ours.special["<unk>"])  # the library's own
            assert parts == ours.decode(start) or own_space or "\ufffd" in parts, (text, cut)


@EACH
def test_a_long_text_read_in_pieces_has_the_tokens_of_the_whole(pairs, tmp_path, kind):
    ours = pairs[kind][0]
    for case, part in PIECES.items():
        for shift in (0, 2, 5):
            text = "x" * shift + " " + part * (1500 // len(part))
            assert ids_in_pieces(ours, text, tmp_path) == ours.encode(text), case


@EACH
def test_names_of_special_tokens_in_a_text_stay_text(pairs, kind):
    """A Unigram vocabulary gives these names the best score of all, so that the library finds them in any text."""
    ours = pairs[kind][0]
    for name in ours.special:
        for text in (name, f"a {name} b", f"{name}{name}", f"x{name}\n"):
            ids = ours.encode(text)
            assert not set(ids) & (set(ours.special.values()) - {ours.special["<unk>"]}), text
            assert ours.decode(ids) == text or "<unk>" in text or kind == "unigram", text


@EACH
def test_text_with_special_tokens_that_a_source_reads_has_the_tokens_of_the_reference(pairs, kind):
    ours, reference = pairs[kind][0], reference_of(kind, special=True)
    generator, names = random.Random(kind), list(pairs[kind][0].special)
    for _ in range(100):
        parts = (generator.choice([*names, " hi\n", "\n", "<tool>", random_text(generator)]) for _ in range(6))
        text = "".join(parts)
        assert encode_text(ours, text, True).tolist() == reference.encode(text, add_special_tokens=False).ids, text


MESSAGES = [
    [question("What is it?"), answer("A test.")],
    [question("  one\n"), answer(" two"), question("\n\nthree"), answer("four \n")],
    [question("你好 🙂"), answer("é\n\n    code"), question("x"), answer("\n\nA")],
]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind][-1]])
def test_a_conversation_has_the_tokens_of_its_text_and_the_answers_are_learnt(pairs, kind):
    """The reference encodes the rendered text in one, as `apply_chat_template` does."""
    ours, reference = pairs[kind][0], reference_of(kind, special=True)
    template = ChatTemplate(ours)
    for messages in MESSAGES:
        spans = template(Conversation(tuple(messages)))
        piece = tokenise(ours, DocumentPiece(spans, 0, Document("x"), first=True, last=True))
        text = "".join(span.text for span in spans)
        assert piece.tokens.tolist() == reference.encode(text, add_special_tokens=False).ids, text
        learnt = "".join(ours.decode([token]) for token in piece.tokens[piece.learn])
        said = [message["content"].strip() for message in messages if message["role"] == "assistant"]
        assert all("".join(part.split()) in "".join(learnt.split()) for part in said if part.isascii()), learnt


@EACH
def test_a_prompt_and_its_completion_are_framed_and_join_as_one_text(pairs, kind):
    ours, reference = pairs[kind]
    reader = RecordReader(SourceTable(path="x.jsonl", content="prompt_completion"), ours)
    spans = reader.read(Document("x.jsonl"), {"prompt": "Say it:", "completion": " a word"})
    piece = tokenise(ours, DocumentPiece(spans, 0, Document("x"), first=True, last=True))
    assert piece.tokens.tolist() == [*reference.encode("Say it: a word").ids, ours.eos_id]
    assert ours.prompt_ids("Say it:") == reference.encode("Say it:").ids


@pytest.mark.parametrize(
    ("settings", "has_bos"), [({}, True), ({"add_bos_token": False}, False), ({"bos_token": None}, True)]
)
def test_the_settings_of_a_release_say_if_documents_begin_with_bos_otherwise_its_post_processor(
    tmp_path, settings, has_bos
):
    ours = build_tokenizer(TokenizerTable(path=str(write_kind(tmp_path, "llama2", **settings))))
    assert (ours.bos_id, ours.eos_id) == (ours.special["<s>"] if has_bos else None, ours.special["</s>"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda file: file.update(pre_tokenizer={"type": "WhitespaceSplit"}), "pre_tokenizer has .*WhitespaceSplit"),
        (lambda file: file["normalizer"]["normalizers"].append({"type": "Lowercase"}), "'Lowercase'.*none, NFC"),
        (lambda file: file["model"].update(end_of_word_suffix="</w>"), "no end_of_word_suffix"),
        (lambda file: file["model"].update(type="WordPiece"), "its model is 'WordPiece'"),
    ],
)
def test_a_kind_that_would_lose_text_is_refused(tmp_path, change, message):
    path = write_kind(tmp_path, "llama2") / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=message):
        build_tokenizer(TokenizerTable(path=str(path)))
