"""Hostile data files: devices and pipes, archives that unpack without end, records that no reader expects."""

import gzip
import io
import json
import os
import pickle
import socket

import pyarrow
import pyarrow.parquet
import zstandard

from tests.support.hostile_cases import BOMB, Bomb, Case, judge

MEMBER_BYTES = 16 << 20  # of an archive; twenty are more than a line may have
LONG_BYTES = 192 << 20
TURNS = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
TEMPLATE = (
    "{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)


def reads(path, **source):
    keys = {"path": path, **source}
    return (f"--data.sources=[{{ {', '.join(f'{key} = {json.dumps(keys[key])}' for key in keys)} }}]",)


def file(name, content, says, code=2):
    def write(folder):
        (folder / name).write_bytes(content if isinstance(content, bytes) else content())

    return Case(write, says, reads(name), code)


def record(line, says, **source):
    return Case(lambda folder: (folder / "bad.jsonl").write_bytes(line + b"\n"), says, reads("bad.jsonl", **source))


def chat(messages, says, **fields):
    def write(folder):
        (folder / "template.jinja").write_text(TEMPLATE)
        (folder / "bad.jsonl").write_text(json.dumps({"messages": messages, **fields}) + "\n")

    return Case(write, says, (*reads("bad.jsonl", content="messages"), "--tokenizer.chat_template=template.jinja"))


def pipe(folder):
    os.mkfifo(folder / "pipe.jsonl")


def linked_pipe(folder):
    os.mkfifo(folder / "pipe")
    (folder / "linked.txt").symlink_to(folder / "pipe")


def listening(folder):
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(folder)  # such names are short
        try:
            server.bind("socket.txt")
        finally:
            os.chdir(here)


def loop(folder):
    (folder / "a.txt").symlink_to("b.txt")
    (folder / "b.txt").symlink_to("a.txt")


def secret(folder):
    (folder / "secret").write_text("hunter2:x:0:0\n")
    (folder / "linked.jsonl").symlink_to(folder / "secret")


def sparse(folder):
    with open(folder / "sparse.jsonl", "wb") as out:
        out.truncate(LONG_BYTES)


def program_of_a_dataset(folder):
    """Write a script of its folder's name, as the package datasets once ran it."""
    (folder / "evil").mkdir()
    (folder / "evil" / "evil.py").write_text("import os\nos.system('touch pwned')\n")


def wide_window():
    """Return a frame that asks for 2 GiB before it gives a byte."""
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    whole = zstandard.ZstdCompressor(compression_params=parameters).compressobj().compress(b"x" * (1 << 20))
    return whole + b"\0" * 100


def parquet(schema=None, **columns):
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns, schema=schema), out)
    return out.getvalue()


def same_text_again_and_again():
    """Return a few megabytes that unpack to 8 GiB: each row is a number that refers to the same long text."""
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 2048, pyarrow.int32()), ["x" * (4 << 20)])
    return parquet(text=texts)


def pickled_type():
    """Return a file with a pickled type, which earlier versions of pyarrow unpickled when they opened the file."""
    metadata = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(Bomb())}
    return parquet(pyarrow.schema([pyarrow.field("other", pyarrow.string(), metadata=metadata)]), other=["a"])


def footer_that_lies():
    whole = parquet(text=["a"])
    return whole[:-8] + (2**31 - 1).to_bytes(4, "little") + whole[-4:]


def page_that_is_not_there():
    whole = parquet(text=["a" * 999])
    return whole[:4] + b"\xff" * 60 + whole[64:]


CASES = {
    "a pipe": Case(pipe, "pipe.jsonl': not an ordinary file", reads("pipe.jsonl")),
    "a link to a pipe": Case(linked_pipe, "linked.txt': not an ordinary file", reads("linked.txt")),
    "a device without end": Case(lambda folder: None, "/dev/zero': not an ordinary file", reads("/dev/zero")),
    "a socket": Case(listening, "socket.txt': not an ordinary file", reads("socket.txt")),
    "links in a circle": Case(loop, "a.txt: cannot be read", reads("a.txt")),
    "all of a pattern's files are pipes": Case(pipe, "there is no such file", reads("*pipe.jsonl")),
    "a folder": Case(lambda folder: None, "is a folder", reads("/etc")),
    "a secret as records": Case(secret, "(?s)^(?!.*hunter2).*linked.jsonl, line 1: ", reads("linked.jsonl")),
    "a hole of a line": Case(sparse, "sparse.jsonl, line 1: longer", reads("sparse.jsonl")),
    "a dataset's program": Case(program_of_a_dataset, "dataset 'evil'", reads("evil", format="dataset")),
    "a gzip of one line without end": file(
        "bomb.jsonl.gz", lambda: gzip.compress(b"a" * MEMBER_BYTES, 1) * 20, "line 1: .* longer than"
    ),
    "a zstd with a window of all memory": file("window.jsonl.zst", wide_window, "line 1: cannot be read from here on"),
    "a gzip in a gzip": file("twice.jsonl.gz", gzip.compress(gzip.compress(b"{}")), "not valid"),
    "no zstd": file("no.jsonl.zst", BOMB, "line 1: cannot be read from here on"),
    "a table's type that is a pickle": file("bad.parquet", pickled_type, "no field 'text'"),
    "a footer that lies": file("bad.parquet", footer_that_lies, "not a readable parquet"),
    "a page that is not there": file("bad.parquet", page_that_is_not_there, "row 1: cannot be read from here on"),
    "the same text again and again": file("bad.parquet", same_text_again_and_again, "bad.parquet.*MemoryError"),
    "a date beyond all years": file(
        "bad.parquet",
        lambda: parquet(text=pyarrow.array([2**30], pyarrow.date32())),
        "row 1: cannot be read from here on",
    ),
    "a record nested without end": record(b"[" * 200_000, "line 1: not valid JSON"),
    "a number without end": record(b'{"text": ' + b"9" * 100_000 + b"}", "line 1: not valid JSON"),
    "a name that is a terminal's command": record(b'{"\\u001b]0;pwned\\u0007": 1}', "no field 'text'"),
    "names without end": record(json.dumps({"a" * 10**7: 1}).encode(), r"no field 'text'.{0,3000}$"),
    "tokens beyond all numbers": record(b'{"tokens": [1, 99999999999999999999]}', "vocabulary has", content="tokens"),
    "tokens below nothing": record(b'{"tokens": [-1]}', "the vocabulary has", content="tokens"),
    "tokens that are infinite": record(b'{"tokens": [Infinity]}', "not a list of integers", content="tokens"),
    "a role that is a terminal's command": chat(
        [{"role": "\x1b[2J", "content": "a"}, {"role": "user", "content": "b"}], "no message of the assistant"
    ),
    "content nested without end": chat([{"role": "user", "content": [[[[]]]]}], "content is a list"),
    "tools nested without end": chat(TURNS, "'tools' is not valid JSON", tools="[" * 200_000),
}


def test_hostile_data_is_a_message_and_touches_nothing(processes, tmp_path):
    judge(CASES, processes, tmp_path)
