"""Paths of sources as users write them: brackets, links, saved datasets, archives; the survey of what they hold."""

import gzip
import json
import logging

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from benchmarks.data import memory_while_reading, write_records
from benchmarks.frame import in_fresh_process
from torchround.config import DataTable, SourceTable
from torchround.data import DataError, build_loader
from torchround.data.formats.source_files import find_files
from torchround.data.formats.streams import open_source


def names(path, folder):
    return [found.relative_to(folder).as_posix() for found in find_files(path)]


def test_a_folder_with_brackets_in_its_name_is_that_folder_if_it_exists(tmp_path):
    for name in ("br[1]/a.py", "br[1]/b[2].py", "br1/c.py", "br2/d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert names(f"{tmp_path}/br[1]/*.py", tmp_path) == ["br[1]/a.py", "br[1]/b[2].py"]
    assert names(f"{tmp_path}/br[1]/b[2].py", tmp_path) == ["br[1]/b[2].py"]
    assert names(f"{tmp_path}/br[12]/*.py", tmp_path) == ["br1/c.py", "br2/d.py"]
    with pytest.raises(DataError, match=r"no file matches .*; \[ begins a set of letters in a glob, and \[\[\]"):
        find_files(f"{tmp_path}/x[1]*.py")
    with pytest.raises(DataError, match=r"no file matches \(working directory: [^;]*\)$"):
        find_files(f"{tmp_path}/x*.py")


def test_linked_files_and_folders_are_read_and_each_file_once(tmp_path, caplog):
    (tmp_path / "disk" / "deep").mkdir(parents=True)
    (tmp_path / "disk" / "a.txt").write_text("a")
    (tmp_path / "disk" / "deep" / "b.txt").write_text("b")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "disk")
    (tmp_path / "data" / "c.txt").symlink_to(tmp_path / "disk" / "a.txt")
    (tmp_path / "disk" / "deep" / "round").symlink_to(tmp_path / "disk")
    found = names(f"{tmp_path}/data/**/*.txt", tmp_path)
    assert [(tmp_path / name).read_text() for name in found] == ["a", "b"]
    assert "each file is read once" in caplog.text
    caplog.clear()
    assert names(f"{tmp_path}/disk/*.txt", tmp_path) == ["disk/a.txt"] and not caplog.text


def test_a_link_that_leads_nowhere_is_named_and_not_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").symlink_to(tmp_path / "not mounted" / "b.txt")
    with pytest.raises(DataError, match=r"b.txt is a link to .*/not mounted/b.txt, which does not exist"):
        find_files(f"{tmp_path}/*.txt")


def test_a_folder_of_save_to_disk_is_recognised_and_names_its_splits(tmp_path):
    rows = datasets.Dataset.from_list([{"text": "a"}])
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"first": rows, "held": rows}).save_to_disk(str(tmp_path / "several"))
    for name in ("one", "several"):
        with pytest.raises(DataError, match=rf"/{name}' is a folder that save_to_disk .* format = \"dataset\""):
            find_files(str(tmp_path / name))
    with pytest.raises(DataError, match=r"split 'train': it has no such split, only first, held \(source keys"):
        open_source(SourceTable(path=str(tmp_path / "several"), format="dataset"))


@pytest.mark.parametrize("name", ["x.txt", "data", "x.csv.gz", "x.xz"])
def test_archives_and_files_of_other_programs_are_not_read_as_text(tmp_path, name):
    path = tmp_path / name
    contents = {
        "a parquet file": b"PAR1" + b"\0" * 20,
        "an Arrow file": b"ARROW1\0\0",
        "a gzip archive": gzip.compress(b"text"),
        "a zip archive": b"PK\x03\x04rest",
        "an xz archive": b"\xfd7zXZ\0",
    }
    for what, content in contents.items():
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"{name} is no text but {what}"):
            open_source(SourceTable(path=str(path)))
    path.write_bytes(b"PAR1 is a word too")
    assert open_source(SourceTable(path=str(path), format="text")).count() == 1


def test_files_of_several_kinds_may_be_mixed_but_not_with_those_of_other_programs(tmp_path):
    """Endings in capitals mean what small ones mean."""
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "a.parquet")
    (tmp_path / "b.json").write_text('[{"text": "b"}, {"text": "c"}]')
    (tmp_path / "c.CSV").write_text("text\nd\n")
    (tmp_path / "c.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "e"}'))
    (tmp_path / "c.txt").write_text("f")
    source = open_source(SourceTable(path=str(tmp_path / "*")))
    texts = [source.read(document, 0)[0] for document in source.first_documents(9)]
    assert texts == ["a", "b", "c", "d", "e", "f"] and source.count() == 6
    (tmp_path / "d.arrow").write_bytes(b"ARROW1\0\0")
    with pytest.raises(DataError, match=r"d.arrow is no text but an Arrow file"):
        open_source(SourceTable(path=str(tmp_path / "*")))


def test_json_lines_under_another_ending_are_read_as_one_text_with_a_warning(tmp_path, tokenizer, caplog):
    path = tmp_path / "x.log"
    for content, warns in (
        (json.dumps({"text": "a"}) + "\n" + json.dumps({"text": "b"}), True),
        ("{not json}\n", False),
        ("plain", False),
    ):
        path.write_text(content)
        caplog.clear()
        for format in ("auto", "text"):
            data = DataTable(sources=(SourceTable(path=str(path), format=format),))
            build_loader(data, tokenizer, 16, 1, 0).check_first_records()
        warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert ["looks like JSON Lines" in record.getMessage() for record in warnings] == [True] * warns


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.jsonl.zst"])
def test_memory_does_not_grow_with_the_documents_that_are_read(tmp_path, name):
    """Memory is compared from 24 000 documents (three blocks of a stream) to 60 000; keeping each would add 7 MiB or more."""
    documents = 60_000
    write_records(tmp_path / name, documents)
    mib = in_fresh_process(memory_while_reading, str(tmp_path / name), documents, 0)["mib_by_tenth"]
    assert len(mib) >= 10
    assert max(mib[4:]) - mib[4] < 4
