"""Normalisation against the package tokenizers: every mark beside every kind of mark, and random text."""

import unicodedata

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from torchround.data.text.tokenizer import NEWER, nfc

MARKS = [chr(code) for code in range(0x110000) if unicodedata.combining(chr(code))]


@pytest.mark.parametrize("other", ["\u0334", "\u0301", "\u0345", "\u05b0"])
def test_every_mark_before_and_after_another_is_normalised_like_the_reference(other: str) -> None:
    reference = normalizers.NFC()
    for mark in MARKS:
        for text in (f"e{mark}{other}", f"e{other}{mark}", f"e\u0327{mark}{other}"):
            assert nfc(text) == reference.normalize_str(text), f"{ord(mark):X}"


def test_every_character_and_its_decomposition_is_normalised_like_the_reference() -> None:
    reference = normalizers.NFC()
    for code in range(0x110000):
        if not 0xD800 <= code < 0xE000:
            for text in {chr(code), unicodedata.normalize("NFD", chr(code))}:
                assert nfc(text) == reference.normalize_str(text), f"{code:X}"


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from(MARKS) | st.characters(codec="utf-8") | st.sampled_from("aeou")))
def test_random_text_with_many_marks_is_normalised_like_the_reference(text: str) -> None:
    assert nfc(text) == normalizers.NFC().normalize_str(text)
    assert nfc(nfc(text)) == nfc(text)


def test_marks_of_tables_newer_than_pythons_stay_where_the_reference_leaves_them() -> None:
    """Later versions of Python will know these marks and letters of Unicode 15, 16 and newer, which regex has already."""
    every = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
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
