"""A format that a user's module reads: the one of docs/data.md ("Adding a format")."""

import pytest

from tests.support.batch_contents import texts_of
from tests.support.pages import example_text
from torchround.config import SourceTable
from torchround.data import DataError
from torchround.data.document_types import DataFileError
from torchround.data.formats.streams import open_source
from torchround.data.shuffling import EpochKey

MODULE = example_text("docs/data.md", "def read(path)")
BREAKS = """        if paragraph == "broken":
            raise ValueError("no such paragraph")
"""


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paragraphs.py").write_text(MODULE)
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text("\n\n".join(f"{number}.{record}" for record in range(4)))
    return lambda **keys: open_source(SourceTable(path="*.txt", **{"module": "paragraphs"} | keys))


def test_every_record_of_every_file_is_read_once_in_each_pass(source):
    expected = [f"{number}.{record}" for number in range(3) for record in range(4)]
    assert texts_of(source()) == expected and source().count() == 12
    assert sorted(texts_of(source(), EpochKey("0/0/0"))) == expected


def test_an_exception_of_the_module_is_an_error_of_its_file_and_names_the_record(source, tmp_path):
    (tmp_path / "broken.py").write_text(MODULE.replace("        yield", f"{BREAKS}        yield"))
    (tmp_path / "1.txt").write_text("good\n\nbroken\n\nunread")
    with pytest.raises(
        DataFileError, match=r"1.txt, record 2: cannot be read from here on: ValueError: no such paragraph"
    ):
        texts_of(source(module="broken"))


def test_a_module_without_the_function_is_one_message(source):
    with pytest.raises(DataError, match=r"source module json: it gives no read\(path\)"):
        source(module="json")


def test_another_module_is_another_source_to_a_saved_position(source, tmp_path):
    (tmp_path / "others.py").write_text(MODULE)
    assert source().fingerprint() != source(module="others").fingerprint()
