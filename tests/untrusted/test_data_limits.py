"""Limits on data files: ordinary lines and ids pass unchanged, absurd ones are refused with the reason."""

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchround.untrusted import data_limits
from torchround.untrusted.data_limits import check_token_ids, read_bounded_line, split_bounded_lines


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=60).map(lambda text: text.replace(b"a", b"\n")), size=st.integers(1, 9))
def test_lines_do_not_depend_on_the_chunks_that_they_come_in(data: bytes, size: int) -> None:
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    expected = data.split(b"\n")
    if not expected[-1]:  # an end of line at the end of the data begins no further line
        expected.pop()
    assert list(split_bounded_lines(iter(chunks))) == expected


def test_a_line_at_the_limit_is_read_and_a_longer_one_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_limits, "MOST_LINE_BYTES", 5)
    assert list(split_bounded_lines(iter([b"12", b"345\n", b"6"]))) == [b"12345", b"6"]
    assert read_bounded_line(io.BytesIO(b"1234\n6")) == b"1234\n"
    with pytest.raises(ValueError, match="longer than"):
        list(split_bounded_lines(iter([b"12", b"345", b"6"])))
    with pytest.raises(ValueError, match="longer than"):
        read_bounded_line(io.BytesIO(b"123456"))


def test_blank_lines_are_refused_only_in_long_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_limits, "MOST_BLANK_LINES", 3)
    assert len(list(split_bounded_lines(iter([b"\n\n\nx\n\n\n\ny\n"])))) == 8
    with pytest.raises(ValueError, match="more than 3 blank lines in a row"):
        list(split_bounded_lines(iter([b"\n\n", b"\n\n"])))


@pytest.mark.parametrize("ids", [[], [0], [5, 3, 2**24]])
def test_distinct_ids_in_range_are_legal(ids: list[int]) -> None:
    check_token_ids(ids)


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([0, -1], "-1 is not a token id"),
        ([2**24 + 1], "is not a token id; legal: 0 to"),
        ([True], "True is not a token id"),
        (["1"], "'1' is not a token id"),
        ([1, 2, 1], "several tokens have the id 1"),
        ([*range(200_000), 199_999], "several tokens have the id 199999"),  # found without a search for each id
    ],
)
def test_other_ids_are_refused_with_the_reason(ids: list[object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        check_token_ids(ids)
