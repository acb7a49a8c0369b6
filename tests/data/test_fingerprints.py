"""The fingerprints of a run's data, by which machines compare their files before they train."""

import shutil
from pathlib import Path

from tests.data.conftest import MakeLoader
from torchround.config import SourceTable, ValidationTable
from torchround.data import Tokenizer, build_validation_loader


def different(one: dict[str, str], other: dict[str, str]) -> list[str]:
    assert one.keys() == other.keys()
    return [key for key in one if one[key] != other[key]]


def test_a_copy_in_another_folder_has_the_same_fingerprints(
    corpus: Path, make_loader: MakeLoader, tmp_path: Path
) -> None:
    shutil.copytree(corpus, tmp_path / "copy")
    assert make_loader().fingerprints() == make_loader(folder=tmp_path / "copy").fingerprints()


def test_a_source_is_named_whose_files_differ_in_size_or_in_their_first_records(
    corpus: Path, make_loader: MakeLoader, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(corpus, copy)
    records = (copy / "records.jsonl").read_text()
    (copy / "records.jsonl").write_text(records.replace("record 1", "rekord 1", 1))
    expected = make_loader().fingerprints()
    assert different(expected, make_loader(folder=copy).fingerprints()) == ["data.sources[1]"]
    (copy / "note-1.txt").write_text("longer than it was")
    assert different(expected, make_loader(folder=copy).fingerprints()) == ["data.sources[0]", "data.sources[1]"]
    assert different(expected, make_loader(seed=1).fingerprints()) == ["data: seed"]


def test_the_data_of_a_validation_have_fingerprints_of_their_own(corpus: Path, tokenizer: Tokenizer) -> None:
    table = ValidationTable(sources=(SourceTable(path=str(corpus / "note-*.txt")),), interval_steps=1)
    found = build_validation_loader(table, tokenizer, 64, 2).fingerprints()
    assert "validation: data.sources[0]" in found
