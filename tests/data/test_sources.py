"""The documents that a source finds, the text it reads, paths as users write them, and messages of unusable files."""

import gzip
import json
import sysconfig
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batch_contents import pieces_of, reading_limits, texts_of
from torchround.config import DataTable, SourceTable
from torchround.data import DataError, Loader
from torchround.data.formats.files import find_files
from torchround.data.formats.streams import open_source


def opened(path, **keys):
    return open_source(SourceTable(path=str(path), **keys))


def test_format_overrules_the_ending_and_text_field_names_the_text(tmp_path):
    (tmp_path / "data.log").write_text('{"body": "a", "text": "b"}\n')
    assert texts_of(opened(tmp_path / "data.log", format="jsonl", field="body")) == ["a"]
    assert texts_of(opened(tmp_path / "data.log", format="text")) == ['{"body": "a", "text": "b"}\n']


@given(
    lines=st.lists(st.text(st.characters(codec="utf-8"), max_size=12), min_size=1, max_size=12), scan=st.integers(1, 40)
)
def test_every_record_of_a_jsonl_file_is_found_however_it_is_scanned(tmp_path_factory, lines, scan):
    path = tmp_path_factory.mktemp("scan") / "x.jsonl"
    path.write_bytes(b"\n".join(json.dumps({"text": line}, ensure_ascii=False).encode() for line in lines))
    with reading_limits(SCAN_BYTES=scan):
        assert texts_of(opened(path)) == lines


@settings(max_examples=30, deadline=None)
@given(text=st.text(st.sampled_from("ab /\n\u00fc\u20ac\U0001f600"), min_size=1, max_size=120), size=st.integers(8, 24))
def test_the_pieces_of_a_long_document_join_to_its_text_and_are_short(tmp_path_factory, text, size):
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "x.txt").write_bytes(text.encode())
    (folder / "x.jsonl").write_text(json.dumps({"text": text}))
    with reading_limits(PIECE_SIZE=size):
        for name in ("x.txt", "x.jsonl"):
            source = opened(folder / name)
            pieces = pieces_of(source, source.first_documents(1)[0])
            assert "".join(pieces) == text
            assert all(0 < len(piece) <= size for piece in pieces)


def test_python_stdlib_is_its_modules_without_tests_and_installed_packages():
    source, root = opened("python-stdlib"), Path(sysconfig.get_path("stdlib"))
    paths = [Path(document.path).relative_to(root) for document in source.first_documents(10**6)]
    assert len(paths) == source.count()
    assert {Path("argparse.py"), Path("json/decoder.py"), Path("asyncio/events.py")} <= set(paths)
    assert not [path for path in paths if {"test", "tests", "site-packages"} & set(path.parts)]
    assert paths == sorted(paths)


@pytest.mark.parametrize("bad", [b"\xff", b"\xe2\x82"], ids=["no UTF-8 at all", "a character cut off at the end"])
def test_text_that_is_not_utf8_is_named_by_file_and_byte(tmp_path, bad):
    (tmp_path / "x.txt").write_bytes(b"good line\n" * 30_000 + b"and then " + bad)
    with pytest.raises(DataError, match=rf"x.txt: not valid UTF-8 at byte 300009 \(0x{bad[0]:02x}"):
        texts_of(opened(tmp_path / "x.txt"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.txt", "there is no such file"),
        ("*.text", "there is no such file"),
        ("folder/", r"is a folder; .*/folder/\*\*/\*.jsonl'"),
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


def test_linked_files_and_folders_are_read_and_each_file_once(tmp_path):
    (tmp_path / "disk" / "deep").mkdir(parents=True)
    (tmp_path / "disk" / "a.txt").write_text("a")
    (tmp_path / "disk" / "deep" / "b.txt").write_text("b")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "disk")
    (tmp_path / "data" / "c.txt").symlink_to(tmp_path / "disk" / "a.txt")
    (tmp_path / "disk" / "deep" / "round").symlink_to(tmp_path / "disk")
    assert [path.read_text() for path in find_files(f"{tmp_path}/data/**/*.txt")] == ["a", "b"]
    assert list(find_files(f"{tmp_path}/disk/*.txt")) == [tmp_path / "disk" / "a.txt"]


def test_a_link_that_leads_nowhere_is_named_and_not_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").symlink_to(tmp_path / "not mounted" / "b.txt")
    with pytest.raises(DataError, match=r"b.txt: cannot be read: No such file"):
        opened(f"{tmp_path}/*.txt")


def test_a_folder_of_save_to_disk_is_recognised_and_names_its_splits(tmp_path):
    rows = datasets.Dataset.from_list([{"text": "a"}])
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"first": rows, "held": rows}).save_to_disk(str(tmp_path / "several"))
    for name in ("one", "several"):
        with pytest.raises(
            DataError, match=rf"/{name}' is a folder; .* if save_to_disk wrote it, .* format = \"dataset\""
        ):
            find_files(str(tmp_path / name))
    with pytest.raises(DataError, match=r"split 'train': KeyError.* \(source keys: split, subset\)"):
        open_source(SourceTable(path=str(tmp_path / "several"), format="dataset"))


def test_files_of_several_kinds_may_be_mixed_but_not_with_archives_that_are_no_text(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    (tmp_path / "b.json").write_text('[{"text": "b"}, {"text": "c"}]')
    (tmp_path / "c.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "e"}'))
    (tmp_path / "c.txt").write_text("f")
    source = open_source(SourceTable(path=str(tmp_path / "*")))
    texts = [source.read(document, 0)[0] for document in source.first_documents(9)]
    assert texts == ["a", "b", "c", "e", "f"] and source.count() == 5
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(b"text"))
    with pytest.raises(DataError, match=r"d.txt.gz: not valid UTF-8 at byte 1 .0x8b"):
        texts_of(open_source(SourceTable(path=str(tmp_path / "*"))))
    (tmp_path / "e.CSV").write_text("text\nd\n")
    with pytest.raises(DataError, match=r"e.CSV: CSV and TSV are not read"):
        open_source(SourceTable(path=str(tmp_path / "*")))


def test_json_lines_under_another_ending_are_read_as_one_text_with_a_warning(tmp_path, tokenizer, caplog):
    for content, warns in (('{"text": "a"}\n{"text": "b"}', True), ("{not json}\n", False), ("plain", False)):
        (tmp_path / "x.log").write_text(content)
        caplog.clear()
        for format in ("auto", "text"):
            data = DataTable(sources=(SourceTable(path=str(tmp_path / "x.log"), format=format),))
            Loader(data, tokenizer, 16, 1, 0).check_first_records()
        assert caplog.text.count("looks like JSON Lines") == len(caplog.messages) == warns
