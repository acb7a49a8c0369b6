"""Checkpoints forged by an attacker who knows the format: one message each, and nothing outside the run is touched.

Checksums find accidents, not attacks: here each checksum is made to fit the forged content.
"""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from tests.support.fork_server import ForkServer
from tests.support.hostile_cases import Case, judge, judge_words
from tests.support.scenarios import prepare

TENSORS = "tensors-00000.safetensors"
STEP = 5
TITLE = "\x1b]0;pwned\x07"  # a terminal would change its title
# Positions of data in their plainest form, which the cases below harm.
NO_WINDOW = "--data.shuffle_sequences=0"
GIVEN = (
    *("--run.name=new", "--checkpoint.load_path=theirs", "--training.steps=8", "--training.on_spike=skip"),
    NO_WINDOW,
)


class Bomb:
    """A pickle that runs a program when it is loaded."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch pwned",)


BOMB = pickle.dumps(Bomb())
DEEP = b'{"a":' * 100_000


@pytest.fixture(scope="module")
def saved(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that a harmless run left."""
    folder = tmp_path_factory.mktemp("harmless")
    prepare(folder)
    run = fork_server.run("trains", ["--run.name=run", NO_WINDOW], folder=folder)
    assert run.wait() == 0, run.text()
    return folder / "outputs" / "run"


def forge_manifest(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Alter the manifest, with a checksum that fits."""
    content = json.loads((path / "manifest.json").read_text())
    del content["xxh3_128"]
    change(content)
    content["xxh3_128"] = xxhash.xxh3_128_hexdigest(json.dumps(content).encode())
    (path / "manifest.json").write_text(json.dumps(content, indent=1))


def forge(path: Path, name: str, content: bytes) -> None:
    """Replace a file's content, and make the manifest fit it."""
    (path / name).write_bytes(content)
    record = {"size_bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    forge_manifest(path, lambda manifest: manifest["files"].update({name: record}))


def instead(name: str, content: bytes):
    return lambda path: forge(path, name, content)


def manifest(change: Callable[[dict[str, Any]], object]):
    return lambda path: forge_manifest(path, change)


def listed(name: str):
    """Add a file to the folder and to its manifest."""

    def change(content: dict[str, Any]) -> None:
        content["files"][name] = {"size_bytes": 8, "xxh3_128": xxhash.xxh3_128_hexdigest(b"precious")}

    return manifest(change)


def state(change: Callable[[dict[str, Any]], object]):
    """Change the saved state."""

    def forge_state(path: Path) -> None:
        content = json.loads((path / "state.json").read_text())
        change(content)
        forge(path, "state.json", json.dumps(content).encode())

    return forge_state


def position(**changes: Any):
    return state(lambda content: content["data"]["position"].update(changes))


def progress(**changes: Any):
    return state(lambda content: content["data"]["position"]["reader"]["sources"][0].update(changes))


def group(**changes: Any):
    """Return the harm of the data position of a run that packs whole documents, at the beginning of a group."""

    def become_group(content: dict[str, Any]) -> None:
        data = content["data"]
        reader = data["position"]["reader"]
        data["data"].update(packing="best_fit", seq_len=16, long_documents="cut")
        counts = {"group": 0, "long": 0, "left": 0}
        names: dict[str, Any] = {"waiting": [], "without": [], "gone": [], "until": None}
        so_far = {"long": 0, "reader": reader}
        data["position"] = {"reader": reader, **counts, **names, "so_far": so_far, **changes}

    return state(become_group)


def without(key: str):
    """Remove a key from a source's progress."""
    return state(lambda content: content["data"]["position"]["reader"]["sources"][0].pop(key))


def header(change: Callable[[dict[str, Any]], Any], length: int | None = None):
    """Put another header in front of the tensors."""

    def forge_header(path: Path) -> None:
        whole = (path / TENSORS).read_bytes()
        end = 8 + int.from_bytes(whole[:8], "little")
        entries = json.loads(whole[8:end])
        changed = change(entries)
        text = changed if isinstance(changed, bytes) else json.dumps(entries).encode()
        given_length = len(text) if length is None else length
        forge(path, TENSORS, given_length.to_bytes(8, "little") + text + whole[end:])

    return forge_header


def first(entries: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = next(entry for name, entry in entries.items() if name != "__metadata__")
    return entry


def renamed_to(name: str):
    """Give the first tensor another name."""

    def rename(entries: dict[str, Any]) -> bytes:
        old = next(name for name in entries if name != "__metadata__")
        renamed = {name if key == old else key: entry for key, entry in entries.items()}
        return json.dumps(renamed).encode()

    return rename


def twice(entries: dict[str, Any]) -> bytes:
    """Write a name twice: readers disagree on which one wins."""
    name = next(name for name in entries if name != "__metadata__")
    text = json.dumps(entries)
    return (text[:-1] + f", {json.dumps(name)}: {json.dumps(entries[name])}}}").encode()


def tensor_values(value: float):
    def forge_values(path: Path) -> None:
        whole = (path / TENSORS).read_bytes()
        end = 8 + int.from_bytes(whole[:8], "little")
        numbers = torch.full(((len(whole) - end) // 4,), value)
        forge(path, TENSORS, whole[:end] + numbers.numpy().tobytes())

    return forge_values


def linked(name: str):
    def link(path: Path) -> None:
        (path / name).rename(path.parent / "outside")
        (path / name).symlink_to("../outside")

    return link


def pipe(name: str):
    def make_pipe(path: Path) -> None:
        (path / name).unlink()
        os.mkfifo(path / name)

    return make_pipe


def hole(name: str):
    def make_hole(path: Path) -> None:
        os.truncate(path / name, 1 << 40)

    return make_hole


# The forgery of `theirs`, and the message about it.
CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a manifest that is a pickle": (
        lambda path: (path / "manifest.json").write_bytes(BOMB),
        "manifest.json is not JSON",
    ),
    "a manifest nested without end": (
        lambda path: (path / "manifest.json").write_bytes(DEEP),
        "manifest.json is not JSON",
    ),
    "a manifest of a terabyte": (hole("manifest.json"), "manifest.json cannot be read: 1099511627776 bytes"),
    "a manifest that is a pipe": (pipe("manifest.json"), "manifest.json cannot be read: not an ordinary file"),
    "a manifest that is a link": (linked("manifest.json"), "manifest.json cannot be read"),
    "a name that climbs": (listed("../precious"), "lists the strange file '../precious'"),
    "an absolute name": (listed("/etc/passwd"), "lists the strange file '/etc/passwd'"),
    "a name with NUL": (listed("tensors-00001.safetensors\0"), "lists the strange file"),
    "a name of two lines": (listed("tensors-00001.safetensors\n"), "lists the strange file"),
    "a name that is a terminal's command": (listed(TITLE), "lists the strange file"),
    "a step below nothing": (manifest(lambda content: content.update(step=-1)), "manifest.json was altered"),
    "a step that is no number": (
        manifest(lambda content: content.update(step=float("nan"))),
        "manifest.json was altered",
    ),
    "a step beyond all": (manifest(lambda content: content.update(step=10**30)), "is after step 10000"),
    "a size beyond all": (
        manifest(lambda content: content["files"][TENSORS].update(size_bytes=2**70)),
        "bytes long instead of",
    ),
    "a format of the future": (manifest(lambda content: content.update(format=10**9)), "has format 1000000000"),
    "tensors that are a link": (linked(TENSORS), "is not an ordinary file"),
    "tensors that are a pipe": (pipe(TENSORS), "is not an ordinary file"),
    "tensors that are a pickle": (instead(TENSORS, BOMB), "header of tensors-00000.safetensors is damaged"),
    "tensors that are a zipped pickle": (
        instead(TENSORS, b"PK\x03\x04" + BOMB),
        "header of tensors-00000.safetensors is damaged",
    ),
    "a header longer than all memory": (header(lambda entries: None, 2**63), "its header would take"),
    "a header nested without end": (header(lambda entries: DEEP), "header of .* is damaged"),
    "a header that is a list": (header(lambda entries: b"[]      "), "header of .* is damaged"),
    "a shape beyond all memory": (
        header(lambda entries: first(entries).update(shape=[2**40, 2**40])),
        "header of .* is damaged",
    ),
    "a shape below nothing": (header(lambda entries: first(entries).update(shape=[-1])), r"has shape \(-1,\)"),
    "a type that does not exist": (header(lambda entries: first(entries).update(dtype="O")), "header of .* is damaged"),
    "offsets that overlap": (
        header(lambda entries: first(entries).update(data_offsets=[4, 8])),
        "header of .* is damaged",
    ),
    "a tensor that is there twice": (header(twice), "header of .* is damaged|not this model's"),
    "a tensor of another name": (
        header(lambda entries: json.dumps(entries).replace("weights/", "../weights/", 1).encode()),
        "not this model's",
    ),
    "a tensor that is a terminal's command": (
        header(lambda entries: entries.update({TITLE: first(entries) | {"shape": [0], "data_offsets": [1, 0]}})),
        r"header of .* is damaged: \\x1b\]0;pwned\\x07 has shape \(0,\) at bytes 1 to 0",
    ),
    "a tensor too many that is a terminal's command": (
        header(renamed_to(TITLE)),
        r"\\x1b\]0;pwned\\x07 is not part of it",
    ),
    "a tensor of a name without end": (header(renamed_to("a" * 10**6)), r"not this model's(?s:.{0,2500})$"),
    "a checksum that is a terminal's command": (
        manifest(lambda content: content["files"][TENSORS].update(xxh3_128=TITLE)),
        "manifest.json was altered",
    ),
    "a checksum that is a list": (
        manifest(lambda content: content["files"][TENSORS].update(xxh3_128=[TITLE])),
        "manifest.json was altered",
    ),
    "tokens that are a terminal's command": (
        state(lambda content: content.update(tokens=TITLE)),
        r"tokens is \\x1b\]0;pwned\\x07",
    ),
    "a state that is a pickle": (instead("state.json", BOMB), "state.json is not JSON"),
    "a state nested without end": (instead("state.json", DEEP), "state.json is not JSON"),
    "a state that is a list": (instead("state.json", b"[]"), "state.json is not a JSON object"),
    "a state of nothing": (instead("state.json", b"{}"), "invalid run state"),
    "a state of a terabyte": (hole("state.json"), "bytes long instead of"),
    "tokens that are infinite": (state(lambda content: content.update(tokens=float("inf"))), "tokens is inf"),
    "tokens below nothing": (state(lambda content: content.update(tokens=-1)), "tokens is -1"),
    "updates that are no number": (
        state(lambda content: content.update(applied_updates=float("nan"))),
        "applied_updates is nan",
    ),
    "updates below nothing": (state(lambda content: content.update(applied_updates=-7)), "applied_updates is -7"),
    "updates beyond all": (state(lambda content: content.update(applied_updates=10**400)), "applied_updates is 1000"),
    "skipped steps that are true": (state(lambda content: content.update(skipped_steps=True)), "skipped_steps is True"),
    "spikes of words": (state(lambda content: content.update(spikes={"loss": ["high"]})), "invalid run state"),
    "spikes that are no numbers": (
        state(lambda content: content.update(spikes={"loss": [float("nan")] * 10})),
        "invalid run state",
    ),
    "spikes that are a number": (state(lambda content: content.update(spikes=1)), "invalid run state"),
    "stale layers of words": (state(lambda content: content.update(stale_layers="x")), "invalid run state"),
    "a name of an optimizer that is a table": (
        state(lambda content: content["config"].update(optimizer={"name": {}})),
        "another optimizer",
    ),
    "a configuration that is a terminal's command": (
        state(lambda content: content["config"]["model"].update(flavor=TITLE)),
        "is of another model",
    ),
    "no position": (state(lambda content: content.update(data={})), "data position"),
    "a position that is a number": (state(lambda content: content["data"].update(position=1)), "data position"),
    "a position of nothing": (state(lambda content: content["data"].update(position={})), "data position"),
    "tokens of no vocabulary": (position(tokens=[10**6]), "data position"),
    "tokens beyond all numbers": (position(tokens=[10**30]), "data position"),
    "tokens that are no numbers": (position(tokens=[float("nan")]), "data position"),
    "labels of words": (position(learn=["x"]), "data position"),
    "a place below nothing": (progress(place=[-3]), "data position"),
    "a place that is a fraction": (progress(place=[0.5]), "data position"),
    "a place of too many numbers": (progress(place=[0, 0, 0]), "data position"),
    "an epoch that is infinite": (progress(epoch=float("inf")), "data position"),
    "a source without its place": (without("place"), "invalid data position"),
    "a source without its bad records": (without("bad"), "invalid data position"),
    "no reader": (position(reader=None), "invalid data position"),
    "tokens that are a table": (position(tokens={}), "invalid data position"),
    "a position of the other packing too": (position(so_far=1), "invalid data position"),
    "a field that no source has": (progress(__class__=1), "data position"),
    "a source that is not there": (
        state(lambda content: content["data"]["position"]["reader"].update(source=99)),
        "data position",
    ),
    "an offset below nothing": (
        state(lambda content: content["data"]["position"]["reader"].update(source=0, offset=-9)),
        "data position",
    ),
}


def given(harm: Callable[[Path], object]):
    """Put the forged checkpoint into a folder, beside a file that no run may touch."""

    def prepare_given(folder: Path) -> None:
        shutil.move(folder / "outputs" / "run" / "checkpoints" / f"step-{STEP}", folder / "theirs")
        (folder / "precious").write_bytes(b"precious")
        harm(folder / "theirs")

    return prepare_given


def config(table: str, **changes: Any):
    """Change a table of the saved configuration."""
    return state(lambda content: content["config"][table].update(changes))


def table(name: str, value: Any):
    return state(lambda content: content["config"].update({name: value}))


def unlisted_link(path: Path) -> None:
    """Link to tensors that the manifest does not list."""
    (path / "tensors-00007.safetensors").symlink_to("../../precious")


def metrics_of_6_gib(path: Path) -> None:
    with open(path.parents[1] / "metrics.jsonl", "wb") as file:
        file.truncate(6 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"step": 5, "loss": 2.5}\n')


PRIVATE = "../precious"
UNFOLLOWED = "an export publishes no file because a checkpoint names it"
# Forgeries that only an export meets, besides those above that harm the files.
EXPORTS = {
    "a template that is a private file": Case(config("tokenizer", chat_template=PRIVATE), UNFOLLOWED),
    "a tokenizer in a private folder": Case(config("tokenizer", path="..", name=None), UNFOLLOWED),
    "a model in a private folder": Case(config("model", hf_path="..", flavor=None), UNFOLLOWED),
    "a name in Markdown": Case(config("run", name="x\n# [click](evil)"), "run.name: given"),
    "a name of letters without end": Case(config("run", name="x" * 10**6), "run.name: given(?s:.{0,2500})$"),
    "no configuration": Case(state(lambda content: content.pop("config")), "holds no configuration"),
    "a configuration that is a list": Case(state(lambda content: content.update(config=[1])), "holds no configuration"),
    "a model that is a list": Case(table("model", []), "model: given"),
    "a model that is nothing": Case(table("model", None), "model: given"),
    "no model": Case(state(lambda content: content["config"].pop("model")), "model"),
    "a family that does not exist": Case(config("model", family="evil"), "there is no family"),
    "a family that is a number": Case(config("model", family=7), "model.family: given 7"),
    "a flavor that does not exist": Case(config("model", flavor="evil"), "no flavor"),
    "a shape of words": Case(config("model", flavor=None, shape={"dim": "big"}), "model.shape"),
    "layers without end": Case(
        config(
            "model",
            family="llama3",
            flavor=None,
            shape={"num_layers": 10_000, "hidden_size": 16, "num_heads": 2, "ffn_size": 32},
        ),
        "lacks block",
    ),
    "adapters of no number": Case(config("lora", rank="x"), "lora.rank: given"),
    "adapters without end": Case(config("lora", rank=10**9, targets=["q"]), "lora|target|not this model's"),
    "a type that is a number": Case(config("training", dtype=3), "training.dtype: given 3"),
    "sources that are words": Case(config("data", sources=["x"]), "data.sources"),
    "a table too many": Case(table("evil", {}), "unknown table"),
    "tables without number": Case(
        state(lambda content: content["config"].update({f"t{number}": {} for number in range(20_000)})),
        r"and 199\d\d more(?s:.{0,2500})$",
    ),
    "sizes of 64 bits without end": Case(
        header(lambda entries: first(entries).update(shape=[2**62] * 200_000)), "200000 dimensions"
    ),
    "sizes of 4000 digits": Case(
        header(lambda entries: first(entries).update(shape=[10**4000] * 800)), "the integer 1000"
    ),
    "a tensor of another shape": Case(
        header(lambda entries: first(entries).update(shape=[1, *first(entries)["shape"]])), "not this model's"
    ),
    "no tensors": Case(header(lambda entries: b"{}"), "embedding"),
    # Harmless ones: without them, the cases above could pass because every checkpoint is refused.
    "tokens that are a table": Case(state(lambda content: content.update(tokens={})), "config.json", code=0),
    "a link beside the tensors": Case(unlisted_link, "config.json", code=0),
    "metrics of 6 GiB": Case(metrics_of_6_gib, "config.json", code=0),
}
FILES = ("a manifest", "a name", "tensors that are a", "a header", "a shape", "a type", "offsets", "a state")
EXPORTS |= {name: Case(harm, "/theirs") for name, (harm, _) in CHECKPOINTS.items() if name.startswith(FILES)}

# The same of a run that keeps documents whole.
GROUPS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a document longer than a sequence": (
        group(waiting=[[[1] * 17, [1] * 17, [0, 0, 0]]]),
        "invalid data position.*17 tokens of a document",
    ),
    "a document of nothing": (group(waiting=[[[], [], [0, 0, 0]]]), "invalid data position.*0 tokens of a document"),
    "a group that nothing is known of": (group(so_far=None), "invalid data position"),
}
CASES = {name: Case(given(harm), says, GIVEN) for name, (harm, says) in CHECKPOINTS.items()} | {
    name: Case(given(harm), says, (*GIVEN, "--data.packing=best_fit")) for name, (harm, says) in GROUPS.items()
}
# A harmless case: without it, the cases above could pass because every checkpoint is refused.
CASES["a group as a run leaves it"] = Case(
    given(group(waiting=[[[1] * 16, [1] * 16, [0, 0, 0]]])),
    "the run is complete",
    (*GIVEN, "--data.packing=best_fit"),
    code=0,
)


def judge_in_copy(case: Case, fork_server: ForkServer, folder: Path, saved: Path) -> None:
    """Judge a case whose harm is in a run that was saved, or in what is given to it."""
    prepare(folder)
    shutil.copytree(saved, folder / "outputs" / "run")
    judge(case, fork_server, folder)


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_checkpoint_is_a_message_and_touches_nothing(
    fork_server: ForkServer, saved: Path, tmp_path: Path, name: str
) -> None:
    judge_in_copy(CASES[name], fork_server, tmp_path, saved)


def test_a_hostile_checkpoint_is_not_exported(fork_server: ForkServer, saved: Path, tmp_path: Path) -> None:
    """All in one process, each within seconds: one message, and no file from outside is published."""
    (tmp_path / "precious").write_bytes(b"precious")
    names = {name: name.replace(" ", "-").replace("'", "") for name in EXPORTS}
    for name, folder in names.items():
        theirs = tmp_path / folder / "checkpoints" / "theirs"
        shutil.copytree(saved / "checkpoints" / f"step-{STEP}", theirs)
        EXPORTS[name].prepare(theirs)
    child = fork_server.run("exports_harm", list(names.values()), folder=tmp_path)
    said = {name: (code, words) for name, code, words in map(json.loads, child.text().splitlines())}
    assert child.wait() == 0 and len(said) == len(names) > 40, child.text()[-3000:]
    for name, folder in names.items():
        judge_words(EXPORTS[name], *said[folder])
    exported = [path for path in (tmp_path / "exports").rglob("*") if path.is_file()]
    assert {path.parent.name for path in exported} == {names[name] for name in EXPORTS if not EXPORTS[name].code}
    assert not any(b"precious" in path.read_bytes() for path in exported)
    assert "2.5000 nats" in (tmp_path / "exports" / "metrics-of-6-GiB" / "README.md").read_text()
