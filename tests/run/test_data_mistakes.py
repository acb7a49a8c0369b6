"""A user's mistake in the data ends `train.py` with exit code 2 and one message: the key, the file, what to do.

Bad records are skipped in these runs: even then a mistake that all records share must not pass.
"""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tests.support.small_run import SmallRuns, small_runs

__all__ = ["small_runs"]

Prepare = Callable[[Path], object]


def writes(name: str, content: str | bytes) -> Prepare:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def lines(**fields: object) -> str:
    return f"{json.dumps(fields)}\n" * 12


def parquet(folder: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"] * 12}), folder / "x.parquet")


def saved(folder: Path) -> None:
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(str(folder / "saved"))


def lost_link(folder: Path) -> None:
    (folder / "x.txt").symlink_to(folder / "gone.txt")


TEMPLATE = "--tokenizer.chat_template=t.jinja"
CHAT = "{% for m in messages %}<|bos|>{{ m.role }}:{{ m.content }}<|eos|>{% endfor %}"
MISTAKES: dict[str, tuple[Prepare, str, str]] = {
    "a column of another name": (parquet, 'path="x.parquet"', "x.parquet, row 1: no field 'text'; fields: question"),
    "a field of a nearly right name": (
        writes("x.jsonl", lines(texts="a")),
        'path="x.jsonl"',
        "x.jsonl, line 1: no field 'text'; fields: texts; nearest: texts",
    ),
    "an instruction without its answer": (
        writes("x.jsonl", lines(instruction="a", response="b")),
        'path="x.jsonl", content="alpaca"',
        "x.jsonl, line 1: no field 'output'; fields: instruction, response",
    ),
    "another kind of content": (
        writes("x.json", json.dumps([{"prompt": "a", "completion": "b"}] * 12)),
        'path="x.json"',
        "x.json, record 1: no field 'text'; fields: completion, prompt (is it a source of content = \"prompt_completion\"?)",
    ),
    "one object of JSON": (
        writes("x.json", json.dumps({"data": [{"text": "a"}]}, indent=1)),
        'path="x.json"',
        "x.json holds neither an array of objects nor one object per line; if the records are in a field",
    ),
    "a column that a table lacks": (
        writes("x.csv", "question,answer\n" + "a,b\n" * 12),
        'path="x.csv", field="answers"',
        "x.csv, row 2: no field 'answers'; fields: answer, question; nearest: answer",
    ),
    "a header twice": (
        writes("x.csv", "text,text\na,b\n"),
        'path="x.csv"',
        "x.csv, row 1: the header has an empty or a repeated name: text, text",
    ),
    "a folder of the package datasets": (
        saved,
        'path="saved"',
        'save_to_disk wrote; source key format = "dataset" reads',
    ),
    "an archive as text": (
        writes("x.txt.gz", gzip.compress(b"text")),
        'path="x.txt.gz"',
        "x.txt.gz is no text but a gzip archive: of these, only .jsonl.gz and .json.gz are read",
    ),
    "a letter of globs": (
        writes("part[1].txt", "text"),
        'path="part[1]*.txt"',
        "; [ begins a set of letters in a glob, and [[] means the letter [ itself",
    ),
    "a link to a disk that is not there": (lost_link, 'path="*.txt"', "x.txt is a link to "),
    "ids of another vocabulary": (
        writes("x.jsonl", lines(tokens=[1, 151_000])),
        'path="x.jsonl", content="tokens"',
        "x.jsonl, line 1: token ids from 1 to 151000; the vocabulary has 0 to 259",
    ),
    "messages without a template": (
        writes("x.jsonl", lines(prompt=[{"role": "user", "content": "a"}], completion="b")),
        'path="x.jsonl", content="prompt_completion"',
        "no chat template",
    ),
    "pictures in a conversation": (
        writes("x.jsonl", lines(messages=[{"role": "user", "content": [{"type": "image_url"}]}])),
        'path="x.jsonl", content="messages"',
        "x.jsonl, line 1: message 0 (user): part 0 of the content is of type 'image_url'; legal: parts of type 'text'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_data_is_one_message_before_anything_is_written(
    small_runs: SmallRuns, capsys: pytest.CaptureFixture[str], mistake: str
) -> None:
    prepare, source, message = MISTAKES[mistake]
    prepare(small_runs.folder)
    (small_runs.folder / "t.jinja").write_text(CHAT + "{% if add_generation_prompt %}<|bos|>assistant:{% endif %}")
    overrides = [f"--data.sources=[{{ {source} }}]", "--data.on_bad_record=skip"]
    if mistake != "messages without a template":
        overrides.append(TEMPLATE)
    capsys.readouterr()  # the package datasets writes while it saves
    assert small_runs("run", *overrides) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1
    assert printed.err.startswith("command line: data.sources: ") and message in printed.err, printed.err
    assert not (small_runs.folder / "outputs").exists()
