"""A user's mistake in the data ends `train.py` with exit code 2 and one message: the key, the file, what to do.

Bad records are skipped in these runs: even then a mistake that all records share must not pass. Further mistakes are
asked of the readers in `tests/data/`.
"""

import json
import re

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from tests.support.small_run import small_runs

__all__ = ["small_runs"]


def writes(name, content):
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def lines(**fields):
    return writes("x.jsonl", f"{json.dumps(fields)}\n" * 12)


def parquet(folder):
    pyarrow.parquet.write_table(pyarrow.table({"question": ["a"] * 12}), folder / "x.parquet")


def saved(folder):
    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(str(folder / "saved"))


TEMPLATE = "--tokenizer.chat_template=t.jinja"
CHAT = "{% for m in messages %}<|bos|>{{ m.role }}:{{ m.content }}<|eos|>{% endfor %}"
PAIRS = json.dumps([{"prompt": "a", "completion": "b"}] * 12)
MISTAKES = {
    "another column": (parquet, 'path="x.parquet"', "x.parquet, row 1: no field 'text'"),
    "no answer": (lines(instruction="a", response="b"), 'path="x.jsonl", content="alpaca"', "no field 'output'"),
    "another kind of content": (writes("x.json", PAIRS), 'path="x.json"', 'record 1: .*"prompt_completion"'),
    "a folder of the package datasets": (saved, 'path="saved"', 'format = "dataset"'),
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
