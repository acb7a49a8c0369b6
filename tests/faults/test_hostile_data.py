"""Hostile data files: devices and pipes, archives that unpack without end, records that no reader expects."""

import gzip
import io
import json
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from tests.support.fork_server import ForkServer
from tests.support.hostile_cases import Case, judge
from tests.support.scenarios import prepare

MEMBER_BYTES = 64 << 20  # of an archive, and as many of them as it takes to fill all memory
LONG_BYTES = 192 << 20
TURNS = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
TEMPLATE = "{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content }}<|eos|>{% endfor %}" + (
    "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"
)


class Bomb:
    """A pickle that runs a program when it is loaded."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch pwned",)


def reads(path: str, **source: object) -> tuple[str, ...]:
    """Return the override that makes this the only source."""
    keys = {"path": path, **source}
    return (f"--data.sources=[{{ {', '.join(f'{key} = {json.dumps(keys[key])}' for key in keys)} }}]",)


def file(name: str, content: bytes | Callable[[], bytes]):
    def prepare_file(folder: Path) -> None:
        (folder / name).write_bytes(content if isinstance(content, bytes) else content())

    return prepare_file


def record(line: bytes, says: str, **source: object) -> Case:
    """A line of JSONL."""
    return Case(file("bad.jsonl", line + b"\n"), says, reads("bad.jsonl", **source))


def chat(messages: object, says: str, **fields: object) -> Case:
    """A conversation."""

    def prepare_chat(folder: Path) -> None:
        (folder / "template.jinja").write_text(TEMPLATE)
        (folder / "bad.jsonl").write_text(json.dumps({"messages": messages, **fields}) + "\n")

    overrides = (*reads("bad.jsonl", content="messages"), "--tokenizer.chat_template=template.jinja")
    return Case(prepare_chat, says, overrides)


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe.jsonl")


def linked_pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "linked.txt").symlink_to(folder / "pipe")


def listening(folder: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(folder)  # such names are short
        try:
            server.bind("socket.txt")
        finally:
            os.chdir(here)


def loop(folder: Path) -> None:
    (folder / "a.txt").symlink_to("b.txt")
    (folder / "b.txt").symlink_to("a.txt")


def secret(folder: Path) -> None:
    (folder / "secret").write_text("hunter2:x:0:0\n")
    (folder / "linked.jsonl").symlink_to(folder / "secret")


def sparse(folder: Path) -> None:
    with open(folder / "sparse.jsonl", "wb") as out:
        out.truncate(LONG_BYTES)


def zipped(content: bytes, times: int) -> Callable[[], bytes]:
    return lambda: gzip.compress(content * MEMBER_BYTES, 1) * times


def zstd(content: bytes, times: int) -> Callable[[], bytes]:
    """Frames of 3 KB each."""
    return lambda: zstandard.ZstdCompressor().compress(content * MEMBER_BYTES) * times


def wide_window() -> bytes:
    """A frame that asks for 2 GiB before it gives a byte."""
    parameters = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    return zstandard.ZstdCompressor(compression_params=parameters).compressobj().compress(b"x" * (1 << 20)) + (
        b"\0" * 100
    )


def parquet(**columns: Any) -> Callable[[], bytes]:
    def written() -> bytes:
        out = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.table(columns), out)
        return out.getvalue()

    return written


def same_text_again_and_again() -> bytes:
    """Write a few megabytes that unpack to 8 GiB: each row is a number that refers to the same long text."""
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 2048, pyarrow.int32()), ["x" * (4 << 20)])
    return parquet(text=texts)()


def pickled_type() -> bytes:
    """Write a parquet file with a pickled type, which earlier versions of pyarrow unpickled when they opened the file."""
    metadata = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": pickle.dumps(Bomb())}
    schema = pyarrow.schema([pyarrow.field("other", pyarrow.string(), metadata=metadata)])
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"other": ["a"]}, schema=schema), out)
    return out.getvalue()


def footer_that_lies() -> bytes:
    """The footer is longer than the file."""
    whole = parquet(text=["a"])()
    return whole[:-8] + (2**31 - 1).to_bytes(4, "little") + whole[-4:]


def page_that_is_not_there() -> bytes:
    """The footer is as it was."""
    whole = parquet(text=["a" * 999])()
    return whole[:4] + b"\xff" * 60 + whole[64:]


FILES = {
    "a pipe": Case(pipe, "pipe.jsonl: .*not an ordinary file", reads("pipe.jsonl")),
    "a link to a pipe": Case(linked_pipe, "linked.txt: .*not an ordinary file", reads("linked.txt")),
    "a device without end": Case(prepare, "/dev/zero: .*not an ordinary file", reads("/dev/zero")),
    "a terminal": Case(prepare, "/dev/ptmx: .*not an ordinary file", reads("/dev/ptmx")),
    "a socket": Case(listening, "socket.txt: ", reads("socket.txt")),
    "links in a circle": Case(loop, "a.txt' does not exist", reads("a.txt")),
    "all of a pattern's files are pipes": Case(pipe, "no file matches", reads("*pipe.jsonl")),
    "this process's memory": Case(prepare, "/proc/self/mem", reads("/proc/self/mem")),
    "a folder": Case(prepare, "is a folder", reads("/etc")),
    "a secret as records": Case(
        secret, "(?s)^(?!.*hunter2).*linked.jsonl, line 1: not valid JSON", reads("linked.jsonl")
    ),
    "a hole of a line": Case(sparse, "sparse.jsonl: the line at byte 0 is longer than", reads("sparse.jsonl")),
}
ARCHIVES = {
    "a gzip of one line without end": Case(
        file("bomb.jsonl.gz", zipped(b"a", 64)), "bomb.jsonl.gz, line 1: .* longer than", reads("bomb.jsonl.gz")
    ),
    "a gzip of blank lines without end": Case(
        file("bomb.jsonl.gz", zipped(b"\n", 64)), "blank lines in a row", reads("bomb.jsonl.gz"), 1
    ),
    "a zstd of one line without end": Case(
        file("bomb.jsonl.zst", zstd(b"a", 64)), "bomb.jsonl.zst, line 1: .* longer than", reads("bomb.jsonl.zst")
    ),
    "a zstd with a window of all memory": Case(
        file("window.jsonl.zst", wide_window), "window.jsonl.zst, line 1: the archive", reads("window.jsonl.zst")
    ),
    "a gzip in a gzip": Case(
        file("twice.jsonl.gz", lambda: gzip.compress(gzip.compress(b"{}"))), "not valid", reads("twice.jsonl.gz")
    ),
    "no gzip": Case(file("no.jsonl.gz", b"PK\x03\x04" * 9), "archive is damaged", reads("no.jsonl.gz")),
    "no zstd": Case(file("no.jsonl.zst", pickle.dumps(Bomb())), "archive is damaged", reads("no.jsonl.zst")),
}
TABLES = {
    "a type that is a pickle": Case(file("bad.parquet", pickled_type), "no field 'text'", reads("bad.parquet")),
    "a pickle": Case(file("bad.parquet", pickle.dumps(Bomb())), "not a readable parquet", reads("bad.parquet")),
    "a footer that lies": Case(file("bad.parquet", footer_that_lies), "not a readable parquet", reads("bad.parquet")),
    "a page that is not there": Case(
        file("bad.parquet", page_that_is_not_there), "row 1: the parquet file is damaged", reads("bad.parquet")
    ),
    "the same text again and again": Case(
        file("bad.parquet", same_text_again_and_again), "bad.parquet.*memory", reads("bad.parquet")
    ),
    "a date beyond all years": Case(
        file("bad.parquet", parquet(text=pyarrow.array([2**30], pyarrow.date32()))),
        "row 1: the parquet file is damaged",
        reads("bad.parquet"),
    ),
    "texts that are numbers": Case(file("bad.parquet", parquet(text=[1.5])), "is a float", reads("bad.parquet")),
}
RECORDS = {
    "nested without end": record(b"[" * 200_000, "line 1: not valid JSON"),
    "a number without end": record(b'{"text": ' + b"9" * 100_000 + b"}", "line 1: not valid JSON"),
    "text that is a number that is none": record(b'{"text": NaN}', "text is a float"),
    "a name that is a terminal's command": record(b'{"\\u001b]0;pwned\\u0007": 1}', "no field 'text'"),
    "names without end": record(json.dumps({"a" * 10**7: 1}).encode(), r"no field 'text'.{0,3000}$"),
    "half a letter": record(b'{"text": "\xc3"}', "not valid UTF-8"),
    "a pickle": record(pickle.dumps(Bomb()), "line 1: not valid"),
    "tokens beyond all vocabularies": record(
        b'{"tokens": [1, 99999999999999999999999]}', "the vocabulary has", content="tokens"
    ),
    "tokens below nothing": record(b'{"tokens": [-1]}', "the vocabulary has", content="tokens"),
    "tokens that are true": record(b'{"tokens": [true]}', "not a list of integers", content="tokens"),
    "tokens that are infinite": record(b'{"tokens": [Infinity]}', "not a list of integers", content="tokens"),
    "tokens that are text": record(b'{"tokens": "1, 2"}', "not a list of integers", content="tokens"),
}
CHATS = {
    "turns that are one": chat("Hello", "messages"),
    "a role that is a list": chat([{"role": ["user"], "content": "a"}], "no role"),
    "a role that is a terminal's command": chat(
        [{"role": "\x1b[2J", "content": "a"}, {"role": "user", "content": "b"}], "no message of the assistant"
    ),
    "content nested without end": chat([{"role": "user", "content": [[[[]]]]}], "content is a list"),
    "tools that are a number": chat(TURNS, "'tools' is a int", tools=1),
    "tools nested without end": chat(TURNS, "'tools' is not valid JSON", tools="[" * 200_000),
}
CASES = {
    f"{kind}: {name}": case
    for kind, cases in (("file", FILES), ("archive", ARCHIVES), ("table", TABLES), ("record", RECORDS), ("chat", CHATS))
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_hostile_data_is_a_message_and_touches_nothing(fork_server: ForkServer, tmp_path: Path, name: str) -> None:
    prepare(tmp_path)
    judge(CASES[name], fork_server, tmp_path)


def test_a_dataset_s_program_is_not_run(fork_server: ForkServer, tmp_path: Path) -> None:
    """A folder with a script of its own name, as the package datasets once ran it."""
    prepare(tmp_path)
    (tmp_path / "evil").mkdir()
    (tmp_path / "evil" / "evil.py").write_text("import os\nos.system('touch pwned')\n")
    child = fork_server.run("meets_harm", [*reads("evil", format="dataset")], folder=tmp_path)
    assert child.wait() == 2 and "data.sources: dataset 'evil'" in child.text(), child.text()
    assert not list(tmp_path.rglob("pwned"))
