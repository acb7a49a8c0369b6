"""The documents that a source finds, the text it reads, and its messages about unusable files."""

import json
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import torchround.untrusted.progress
from torchround.config import SourceTable
from torchround.data import DataError
from torchround.data.document_types import Document
from torchround.data.formats import source_files as files_module
from torchround.data.formats.sources import Source
from torchround.data.formats.streams import open_source


def read_all(source: Source) -> list[str]:
    return ["".join(pieces_of(source, document)) for document in documents_of(source)]


def documents_of(source: Source) -> list[Document]:
    """Return the documents as listed, by walking through the cursors of a pass."""
    documents = []
    cursor = source.first_cursor()
    while (found := source.locate(cursor, None)) is not None:
        document, cursor = found
        documents.append(document)
    assert len(documents) == source.count()
    return documents


def pieces_of(source: Source, document: Document) -> list[str]:
    pieces = []
    offset: int | None = 0
    while offset is not None:
        text, offset = source.read(document, offset)
        assert isinstance(text, str)
        pieces.append(text)
    return pieces


def test_a_glob_reads_its_files_in_sorted_order_and_each_by_its_ending(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "c.jsonl").write_text('{"text": "third"}\n{"text": "fourth"}')
    (tmp_path / "a.md").write_text("first")
    (tmp_path / "deep" / "z.txt").write_text("last")
    source = open_source(SourceTable(path=str(tmp_path / "**" / "*")))
    assert read_all(source) == ["first", "second", "third", "fourth", "last"]


def test_format_overrules_the_ending_and_text_field_names_the_text(tmp_path: Path) -> None:
    (tmp_path / "data.log").write_text('{"body": "a", "text": "b"}\n')
    as_jsonl = open_source(SourceTable(path=str(tmp_path / "data.log"), format="jsonl", field="body"))
    as_text = open_source(SourceTable(path=str(tmp_path / "data.log"), format="text"))
    assert read_all(as_jsonl) == ["a"]
    assert read_all(as_text) == ['{"body": "a", "text": "b"}\n']


@settings(max_examples=60, deadline=None)
@given(
    lines=st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=1, max_size=12), scan=st.integers(1, 40)
)
def test_every_record_of_a_jsonl_file_is_found_however_it_is_scanned(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], scan: int
) -> None:
    path = tmp_path_factory.mktemp("scan") / "x.jsonl"
    path.write_bytes(b"\n".join(json.dumps({"text": line}, ensure_ascii=False).encode() for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files_module, "SCAN_BYTES", scan)
        assert read_all(open_source(SourceTable(path=str(path)))) == lines


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("ab /\n\u00fc\u20ac\U0001f600"), min_size=1, max_size=120), size=st.integers(8, 24))
def test_the_pieces_of_a_long_document_join_to_its_text_and_are_short(
    tmp_path_factory: pytest.TempPathFactory, text: str, size: int
) -> None:
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "x.txt").write_bytes(text.encode())
    (folder / "x.jsonl").write_text(json.dumps({"text": text}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files_module, "PIECE_SIZE", size)
        for name in ("x.txt", "x.jsonl"):
            source = open_source(SourceTable(path=str(folder / name)))
            pieces = pieces_of(source, documents_of(source)[0])
            assert "".join(pieces) == text
            assert all(0 < len(piece) <= size for piece in pieces)


def test_python_stdlib_is_its_modules_without_tests_and_installed_packages() -> None:
    source = open_source(SourceTable(path="python-stdlib"))
    root = Path(sysconfig.get_path("stdlib"))
    paths = [Path(document.path).relative_to(root) for document in documents_of(source)]
    assert {Path("argparse.py"), Path("json/decoder.py"), Path("asyncio/events.py")} <= set(paths)
    assert not [path for path in paths if {"test", "tests", "site-packages"} & set(path.parts)]
    assert paths == sorted(paths)
    assert sum(len(text) for text in read_all(source)) > 5_000_000


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"text": "ok"}\n{"text": "bad\n', r"x.jsonl, line 2: not valid JSON: "),
        (b'{"text": "ok"}\n\n["no object"]\n', r"x.jsonl, line 3: a JSON list, not an object"),
        (
            b'{"text": "ok"}\n{"body": "b", "also": 1}\n',
            r"x.jsonl, line 2: no field 'text'; fields: also, body \(the source's key field names the one to read\)",
        ),
        (b'{"text": 7}\n', r"x.jsonl, line 1: the text is a int, not a string"),
        (b'{"text": null}', r"x.jsonl, line 1: the text is null, not a string"),
        (b'{"text": "ok"}\n{"text": "\xff"}\n', r"x.jsonl, line 2: not valid UTF-8 \(byte 0xff"),
        (b'{"a":' * 100_000, r"x.jsonl, line 1: not valid JSON"),
    ],
)
def test_a_bad_record_is_named_by_file_and_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    source = open_source(SourceTable(path=str(tmp_path / "x.jsonl")))
    with pytest.raises(DataError, match=message):
        read_all(source)


@pytest.mark.parametrize("bad", [b"\xff", b"\xe2\x82"], ids=["no UTF-8 at all", "a character cut off at the end"])
def test_text_that_is_not_utf8_is_named_by_file_and_line(tmp_path: Path, bad: bytes) -> None:
    before = b"good line\n" * 30_000
    (tmp_path / "x.txt").write_bytes(before + b"and then " + bad)
    source = open_source(SourceTable(path=str(tmp_path / "x.txt")))
    with pytest.raises(DataError, match=rf"x.txt, line 30001: not valid UTF-8 \(byte 0x{bad[0]:02x}"):
        read_all(source)


def test_empty_files_and_blank_lines_hold_no_text_and_are_no_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.jsonl").write_text('\n{"text": "x"}\n \n')
    assert read_all(open_source(SourceTable(path=str(tmp_path / "*")))) == ["", "", "x", ""]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.txt", "does not exist"),
        ("*.csv", "no file matches"),
        ("folder/", r"is a folder; name its files with a glob such as .*/folder/\*\*/\*.txt'"),
        ("folder/empty*", "all of its 2 files are empty"),
    ],
)
def test_a_source_without_documents_is_named_when_it_is_built(tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "empty-1.txt").touch()
    (tmp_path / "folder" / "empty-2.jsonl").touch()
    with pytest.raises(DataError, match=message) as caught:
        open_source(SourceTable(path=f"{tmp_path}/{path}"))
    assert f"{tmp_path}/{path}" in str(caught.value)


@pytest.mark.parametrize(
    ("names", "ending"),
    [
        (["a.jsonl.gz", "b.jsonl.gz", "notes.txt", ".hidden"], ".jsonl.gz"),
        (["below/a.parquet", "below/b.parquet", "README.md"], ".parquet"),
        (["LICENSE"], ".txt"),
    ],
)
def test_for_a_folder_a_glob_of_its_files_is_proposed(tmp_path: Path, names: list[str], ending: str) -> None:
    (tmp_path / "below").mkdir()
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(DataError) as caught:
        open_source(SourceTable(path=str(tmp_path)))
    assert str(caught.value).endswith(f"such as '{tmp_path}/**/*{ending}'")


def test_a_file_that_disappears_is_named_when_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("text")
    source = open_source(SourceTable(path=str(tmp_path / "x.txt")))
    (tmp_path / "x.txt").unlink()
    with pytest.raises(DataError, match=r"x.txt: cannot be read: No such file"):
        read_all(source)


def test_a_path_with_brackets_that_exists_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "part[1].txt").write_text("text")
    assert read_all(open_source(SourceTable(path=str(tmp_path / "part[1].txt")))) == ["text"]


def test_indexing_that_takes_long_says_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "x"}\n' * 9)
    table = SourceTable(path=str(tmp_path / "*.jsonl"))
    open_source(table)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(torchround.untrusted.progress, "EVERY_S", 0.0)
    open_source(table)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith(f"indexing {tmp_path / 'a.jsonl'}: 0.00 MiB") and "2 of 2 (100 %)" in lines[-1]
