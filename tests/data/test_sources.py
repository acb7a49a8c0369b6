"""The documents that a source finds, the text it reads, and its messages about unusable files."""

import json
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batch_contents import reading_limits
from torchround.config import SourceTable
from torchround.data import DataError
from torchround.data.formats.streams import open_source


def opened(path, **keys):
    return open_source(SourceTable(path=str(path), **keys))


def read_all(source):
    return ["".join(pieces_of(source, document)) for document in documents_of(source)]


def documents_of(source):
    """Return the documents as listed, by walking through the cursors of a pass."""
    documents, cursor = [], source.first_cursor()
    while (found := source.locate(cursor, None)) is not None:
        document, cursor = found
        documents.append(document)
    assert len(documents) == source.count()
    return documents


def pieces_of(source, document):
    pieces, offset = [], 0
    while offset is not None:
        text, offset = source.read(document, offset)
        pieces.append(text)
    return pieces


def test_a_glob_reads_its_files_in_sorted_order_and_each_by_its_ending(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "c.jsonl").write_text('{"text": "third"}\n{"text": "fourth"}')
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "deep" / "z.txt").write_text("last")
    assert read_all(opened(tmp_path / "**" / "*")) == ["first", "second", "third", "fourth", "last"]


def test_format_overrules_the_ending_and_text_field_names_the_text(tmp_path):
    (tmp_path / "data.log").write_text('{"body": "a", "text": "b"}\n')
    assert read_all(opened(tmp_path / "data.log", format="jsonl", field="body")) == ["a"]
    assert read_all(opened(tmp_path / "data.log", format="text")) == ['{"body": "a", "text": "b"}\n']


@settings(max_examples=25, deadline=None)
@given(
    lines=st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=1, max_size=12), scan=st.integers(1, 40)
)
def test_every_record_of_a_jsonl_file_is_found_however_it_is_scanned(tmp_path_factory, lines, scan):
    path = tmp_path_factory.mktemp("scan") / "x.jsonl"
    path.write_bytes(b"\n".join(json.dumps({"text": line}, ensure_ascii=False).encode() for line in lines))
    with reading_limits(SCAN_BYTES=scan):
        assert read_all(opened(path)) == lines


@settings(max_examples=30, deadline=None)
@given(text=st.text(st.sampled_from("ab /\n\u00fc\u20ac\U0001f600"), min_size=1, max_size=120), size=st.integers(8, 24))
def test_the_pieces_of_a_long_document_join_to_its_text_and_are_short(tmp_path_factory, text, size):
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "x.txt").write_bytes(text.encode())
    (folder / "x.jsonl").write_text(json.dumps({"text": text}))
    with reading_limits(PIECE_SIZE=size):
        for name in ("x.txt", "x.jsonl"):
            source = opened(folder / name)
            pieces = pieces_of(source, documents_of(source)[0])
            assert "".join(pieces) == text
            assert all(0 < len(piece) <= size for piece in pieces)


def test_python_stdlib_is_its_modules_without_tests_and_installed_packages():
    source, root = opened("python-stdlib"), Path(sysconfig.get_path("stdlib"))
    paths = [Path(document.path).relative_to(root) for document in documents_of(source)]
    assert {Path("argparse.py"), Path("json/decoder.py"), Path("asyncio/events.py")} <= set(paths)
    assert not [path for path in paths if {"test", "tests", "site-packages"} & set(path.parts)]
    assert paths == sorted(paths)


@pytest.mark.parametrize("bad", [b"\xff", b"\xe2\x82"], ids=["no UTF-8 at all", "a character cut off at the end"])
def test_text_that_is_not_utf8_is_named_by_file_and_line(tmp_path, bad):
    (tmp_path / "x.txt").write_bytes(b"good line\n" * 30_000 + b"and then " + bad)
    with pytest.raises(DataError, match=rf"x.txt, line 30001: not valid UTF-8 \(byte 0x{bad[0]:02x}"):
        read_all(opened(tmp_path / "x.txt"))


def test_empty_files_and_blank_lines_hold_no_text_and_are_no_error(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.jsonl").write_text('\n{"text": "x"}\n \n')
    assert read_all(opened(tmp_path / "*")) == ["", "", "x", ""]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.txt", "does not exist"),
        ("*.csv", "no file matches"),
        ("folder/", r"is a folder; .*/folder/\*\*/\*.txt'"),
        ("folder/empty*", "all of its 2 files are empty"),
    ],
)
def test_a_source_without_documents_is_named_when_it_is_built(tmp_path, path, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "empty-1.txt").touch()
    (tmp_path / "folder" / "empty-2.jsonl").touch()
    with pytest.raises(DataError, match=message) as caught:
        opened(f"{tmp_path}/{path}")
    assert f"{tmp_path}/{path}" in str(caught.value)


@pytest.mark.parametrize(
    ("names", "ending"),
    [
        (["a.jsonl.gz", "b.jsonl.gz", "notes.txt", ".hidden"], ".jsonl.gz"),
        (["below/a.parquet", "below/b.parquet", "README.md"], ".parquet"),
        (["LICENSE"], ".txt"),
    ],
)
def test_for_a_folder_a_glob_of_its_files_is_proposed(tmp_path, names, ending):
    """Links are followed, and a circle of them is not."""
    folder, linked = tmp_path / "disk", tmp_path / "data"
    (folder / "below").mkdir(parents=True)
    linked.mkdir()
    for name in names:
        (folder / name).touch()
    (linked / "linked").symlink_to(folder)
    (folder / "again").symlink_to(folder)
    for path in (folder, linked):
        with pytest.raises(DataError) as caught:
            opened(path)
        assert str(caught.value).endswith(f"such as '{path}/**/*{ending}'")
