"""Normalisation against the package tokenizers: every mark beside every kind of mark, and random text."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import normalizers

from torchround.data.nfc import nfc

MARKS = [chr(code) for code in range(0x110000) if unicodedata.combining(chr(code))]


@pytest.mark.parametrize("other", ["\u0334", "\u0301", "\u0345", "\u05b0"])
def test_every_mark_before_and_after_another_one(other: str) -> None:
    reference = normalizers.NFC()
    for mark in MARKS:
        for text in (f"e{mark}{other}", f"e{other}{mark}", f"e\u0327{mark}{other}"):
            assert nfc(text) == reference.normalize_str(text), f"{ord(mark):X}"


def test_every_character_and_its_decomposition() -> None:
    reference = normalizers.NFC()
    for code in range(0x110000):
        if not 0xD800 <= code < 0xE000:
            for text in {chr(code), unicodedata.normalize("NFD", chr(code))}:
                assert nfc(text) == reference.normalize_str(text), f"{code:X}"


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.sampled_from(MARKS) | st.characters(codec="utf-8") | st.sampled_from("aeou")))
def test_random_text_with_many_marks(text: str) -> None:
    assert nfc(text) == normalizers.NFC().normalize_str(text)
    assert nfc(nfc(text)) == nfc(text)
