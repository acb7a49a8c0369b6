"""A user's mistake in the data ends `train.py` with exit code 2 and one message: the key, the file, what to do.

Bad records are skipped in these runs: even then a mistake that all records share must not pass.
"""

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tests.support.small_run import small_runs

__all__ = ["small_runs"]

Prepare = Callable[[Path], object]


def writes(name, content):
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def lines(**fields):
    return writes("x.jsonl", f"{json.dumps(fields)}\n" * 12)


def parquet(folder):
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"] * 12}), folder / "x.parquet")


def saved(folder):
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(str(folder / "saved"))


def lost_link(folder):
    (folder / "x.txt").symlink_to(folder / "gone.txt")


TEMPLATE = "--tokenizer.chat_template=t.jinja"
CHAT = "{% for m in messages %}<|bos|>{{ m.role }}:{{ m.content }}<|eos|>{% endfor %}"
PAIRS = json.dumps([{"prompt": "a", "completion": "b"}] * 12)
PICTURE = [{"role": "user", "content": [{"type": "image_url"}]}]
MISTAKES = {
    "another column": (parquet, 'path="x.parquet"', "x.parquet, row 1: no field 'text'"),
    "a nearly right name": (lines(texts="a"), 'path="x.jsonl"', "x.jsonl, line 1: .*nearest: texts"),
    "no answer": (lines(instruction="a", response="b"), 'path="x.jsonl", content="alpaca"', "no field 'output'"),
    "another kind of content": (writes("x.json", PAIRS), 'path="x.json"', 'record 1: .*"prompt_completion"'),
    "one object of JSON": (writes("x.json", '{\n"data": [{"text": "a"}]\n}'), 'path="x.json"', "array of objects"),
    "no such column": (
        writes("x.csv", "question\n" + "a\n" * 12),
        'path="x.csv", field="answers"',
        "row 2: .*'answers'",
    ),
    "a header twice": (writes("x.csv", "text,text\na,b\n"), 'path="x.csv"', "a repeated name: text, text"),
    "a folder of the package datasets": (saved, 'path="saved"', 'format = "dataset"'),
    "an archive as text": (writes("x.txt.gz", gzip.compress(b"text")), 'path="x.txt.gz"', "gzip archive"),
    "a letter of globs": (writes("part[1].txt", "text"), 'path="part[1]*.txt"', r"\[\[\]"),
    "a link to a disk that is not there": (lost_link, 'path="*.txt"', "x.txt is a link to "),
    "ids of another vocabulary": (
        lines(tokens=[1, 151_000]),
        'path="x.jsonl", content="tokens"',
        "151000; .* 0 to 259",
    ),
    "no template": (
        lines(prompt=[{"role": "user", "content": "a"}], completion="b"),
        'path="x.jsonl", content="prompt_completion"',
        "no chat template",
    ),
    "pictures in a chat": (lines(messages=PICTURE), 'path="x.jsonl", content="messages"', "line 1: .*'image_url'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_data_is_one_message_before_anything_is_written(small_runs, capsys, mistake):
    prepare, source, message = MISTAKES[mistake]
    prepare(small_runs.folder)
    (small_runs.folder / "t.jinja").write_text(CHAT + "{% if add_generation_prompt %}<|bos|>assistant:{% endif %}")
    overrides = [f"--data.sources=[{{ {source} }}]", "--data.on_bad_record=skip"]
    if mistake != "no template":
        overrides.append(TEMPLATE)
    for dry in ((), ("--dry-run",)):
        capsys.readouterr()  # the package datasets writes while it saves
        assert small_runs("run", *overrides, *dry) == 2
        printed = capsys.readouterr()
        assert printed.out == "" and len(printed.err.splitlines()) == 1
        assert re.match(f"command line: data.sources: .*{message}", printed.err), printed.err
        assert not (small_runs.folder / "outputs").exists()
