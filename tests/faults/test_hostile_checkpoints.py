"""Checkpoints and run folders forged by an attacker who knows the format: one message each, nothing outside is touched.

Checksums find accidents, not attacks: here each checksum is made to fit the forged content.
"""

import json
import math
import os
import shutil

import pytest
import torch

from tests.support.hostile_cases import (
    BOMB,
    DEEP,
    ESCAPED,
    TITLE,
    Case,
    first,
    forge_file,
    forge_header,
    forge_manifest,
    judge,
    renamed_to,
)
from tests.support.small_run import SmallRuns
from torchround.checkpoint.folders import UNFINISHED, checkpoint_name

TENSORS = "tensors-00000.safetensors"
STEP = 5
# Positions of data in their plainest form, which the cases below harm.
NO_WINDOW = "--data.shuffle_sequences=0"
GIVEN = ("--run.name=new", "--checkpoint.load_path=theirs", "--training.steps=8", "--training.on_spike=skip", NO_WINDOW)


@pytest.fixture(scope="module")
def saved(processes, tmp_path_factory):
    folder = tmp_path_factory.mktemp("harmless")
    SmallRuns(folder)
    run = processes.run("tests.support.scenarios:trains", ["--run.name=run", NO_WINDOW], folder=folder)
    assert run.wait() == 0, run.text()
    return folder / "outputs" / "run"


# What harms the checkpoint at a path.
def instead(name, content):
    return lambda path: forge_file(path / name, content)


def manifest(change=None, **changes):
    return lambda path: forge_manifest(path, change or (lambda content: content.update(changes)))


def listed(name):
    return manifest(lambda content: content["files"].update({name: {"size_bytes": 8, "xxh3_128": "0" * 32}}))


def record(**changes):
    return manifest(lambda content: content["files"][TENSORS].update(changes))


def state(change=None, **changes):
    def forge_state(path):
        content = json.loads((path / "state.json").read_text())
        (change or (lambda content: content.update(changes)))(content)
        forge_file(path / "state.json", json.dumps(content).encode())

    return forge_state


def config(table=None, **changes):
    return state(lambda content: (content["config"][table] if table else content["config"]).update(changes))


def header(change, length=None):
    return lambda path: forge_file(path / TENSORS, forge_header((path / TENSORS).read_bytes(), change, length))


def another_shape(entries):
    entry = next(entry for name, entry in entries.items() if name.startswith("weights/block."))
    entry["shape"] = [1, *entry["shape"]]


def tensor_values(value):
    def forge_values(path):
        whole = (path / TENSORS).read_bytes()
        end = 8 + int.from_bytes(whole[:8], "little")
        forge_file(path / TENSORS, whole[:end] + torch.full(((len(whole) - end) // 4,), value).numpy().tobytes())

    return forge_values


def written(name, content):
    return lambda path: (path / name).write_bytes(content)


def linked(name):
    def link(path):
        (path / name).rename(path.parent / "outside")
        (path / name).symlink_to("../outside")

    return link


def pipe(name):
    def make_pipe(path):
        (path / name).unlink(missing_ok=True)
        os.mkfifo(path / name)

    return make_pipe


def hole(name):
    return lambda path: os.truncate(path / name, 1 << 40)


# Forgeries of the files: a run that loads them and an export meet the same reader.
FILES = {
    "a manifest nested without end": (written("manifest.json", DEEP), "manifest.json is not JSON"),
    "a manifest of a terabyte": (hole("manifest.json"), "manifest.json cannot be read: 1099511627776 bytes"),
    "a manifest that is a pipe": (pipe("manifest.json"), "manifest.json cannot be read: not an ordinary file"),
    "a manifest that is a link": (linked("manifest.json"), "manifest.json cannot be read"),
    "a name that climbs": (listed("../precious"), "strange file '../precious'"),
    "a name of two lines": (listed("tensors-00001.safetensors\n"), "strange file"),
    "a name that is a terminal's command": (listed(TITLE), "strange file"),
    "tensors that are a pipe": (pipe(TENSORS), "is not an ordinary file"),
    "tensors that are a pickle": (instead(TENSORS, BOMB), "the header of tensors-0|its header would"),
    "a header longer than all memory": (header(lambda entries: None, 2**63), "its header would take"),
    "a header nested without end": (header(lambda entries: DEEP), "header .*is damaged"),
    "a shape beyond all memory": (header(first(shape=[2**40, 2**40])), "header .*is damaged"),
    "a type that does not exist": (header(first(dtype="O")), "header .*is damaged|of a type that is not read"),
    "offsets that overlap": (header(first(data_offsets=[4, 8])), "header .*is damaged"),
    "a state that is a pickle": (instead("state.json", BOMB), "state.json is not JSON"),
    "a state nested without end": (instead("state.json", DEEP), "state.json is not JSON"),
    "a state of a terabyte": (hole("state.json"), "bytes long instead of"),
}
LOADS = FILES | {
    "a step beyond all": (manifest(step=10**30), "is after step 10000"),
    "a size beyond all": (record(size_bytes=2**70), "bytes long instead of"),
    "a format of the future": (manifest(format=10**9), "format 1000000000 is not read"),
    "a checksum that is a terminal's command": (record(xxh3_128=TITLE), "manifest.json was altered"),
    "a tensor that is a terminal's command": (
        header(lambda entries: entries.update({TITLE: {"dtype": "F32", "shape": [0], "data_offsets": [1, 0]}})),
        rf"header of .* is damaged: {ESCAPED}\\x07 has shape \(0,\) at bytes 1 to 0",
    ),
    "a tensor too many that is a terminal's command": (header(renamed_to(TITLE)), rf"{ESCAPED}\\x07 is not part of it"),
    "a tensor of a name without end": (header(renamed_to("a" * 10**6)), r"not this model's(?s:.{0,2500})$"),
    "a state that is a list": (instead("state.json", b"[]"), "state.json is not a JSON object"),
    "tokens that are a terminal's command": (state(tokens=TITLE), f"tokens is {ESCAPED}"),
    "tokens that are infinite": (state(tokens=math.inf), "tokens is inf"),
    "updates beyond all": (state(applied_updates=10**400), "applied_updates is 1000"),
    "skipped steps that are true": (state(skipped_steps=True), "skipped_steps is True"),
    "spikes of words": (state(spikes={"loss": ["high"]}), "invalid run state"),
    "spikes that are no numbers": (state(spikes={"loss": [math.nan] * 10}), "invalid run state"),
    "stale layers of words": (state(stale_layers="x"), "invalid run state"),
    "a name of an optimizer that is a table": (config(optimizer={"name": {}}), "another optimizer"),
    "a configuration that is a terminal's command": (config("model", flavor=TITLE), "is of another model"),
}
OWN = ("--run.name=run", "--training.steps=8", NO_WINDOW)
MEASURED = (*OWN, "--engine.plan=none", "--engine.measure_steps=1")


def own(harm, says, arguments=OWN, code=0):
    """Put a whole run's folder in place, as an attacker may have sent it; the run says what it does not use."""
    return Case(lambda folder: harm(folder / "outputs" / "run"), says, arguments, code)


def plan(**changes):
    def forge_plan(path):
        content = json.loads((path / "plan.json").read_text())
        content["stages"][0].update(changes.pop("stage", {}))
        (path / "plan.json").write_text(json.dumps(content | changes))

    return own(forge_plan, "planned again from 1 measured steps", MEASURED)


def outside(name):
    def link(path):
        (path.parents[1] / "elsewhere").mkdir()
        (path.parents[1] / "elsewhere" / "precious").write_text("precious")
        (path / "checkpoints" / name).symlink_to(path.parents[1] / "elsewhere")

    return link


def newest(harm):
    return lambda path: harm(path / "checkpoints" / checkpoint_name(STEP))


def checkpoints_that_are_a_file(path):
    shutil.rmtree(path / "checkpoints")
    (path / "checkpoints").touch()


NUMBERS_BEYOND_ALL = b'{"forward": [1e999], "fused": -1, "backward": [], "rounds": 1e9}'
RUNS = {
    "nothing but a forged checkpoint": own(newest(instead("state.json", BOMB)), "none of the checkpoints", code=1),
    "weights that are no numbers": own(
        newest(tensor_values(math.nan)),
        "BadStepsError|not finite",
        (*OWN, "--training.steps=40", "--training.max_skipped_steps=3"),
        1,
    ),
    "a linked checkpoint": own(outside(checkpoint_name(9)), f"{checkpoint_name(9)}: manifest.json cannot be read"),
    "leftovers that are a link": own(outside(checkpoint_name(9, UNFINISHED)), "the run is complete"),
    "checkpoints that are a file": own(checkpoints_that_are_a_file, "CheckpointError: .*File exists", code=1),
    "metrics nested without end": own(written("metrics.jsonl", DEEP + b"\n"), "the run is complete"),
    "metrics that are a pipe": own(pipe("metrics.jsonl"), "metrics.jsonl .*not an ordinary file", code=2),
    "a lock that is a pipe": own(pipe(".lock"), "lock .*not an ordinary file", code=2),
    "a plan nested without end": own(written("plan.json", DEEP), "the run is complete"),
    "a plan that is a pipe": own(pipe("plan.json"), "plan.json .*not an ordinary file", code=2),
    "a plan of numbers beyond all": own(
        written("plan.json", NUMBERS_BEYOND_ALL), "the run is complete", (*OWN, "--engine.plan=none")
    ),
    "a plan with a terminal's command": plan(stage={"first_layer": TITLE, "kind": "\x1b[2J"}),
    "a plan without stages that is infinite": plan(stages=[], bubble=math.inf),
    "a validation that no run had": own(newest(state(validation=[1])), "invalid run state .*validation is", code=2),
}


def given(harm):
    def put(folder):
        theirs = folder / "theirs"
        shutil.move(folder / "outputs" / "run" / "checkpoints" / checkpoint_name(STEP), theirs)
        (folder / "precious").write_bytes(b"precious")
        harm(theirs)

    return put


def run_of(saved):
    def prepared(folder):
        SmallRuns(folder)
        shutil.copytree(saved, folder / "outputs" / "run")

    return prepared


def test_hostile_checkpoints_and_run_folders_are_a_message_and_touch_nothing(processes, saved, tmp_path):
    cases = {name: Case(given(harm), says, GIVEN) for name, (harm, says) in LOADS.items()}
    judge({**cases, **RUNS}, processes, tmp_path, run_of(saved))


def unlisted_link(path):
    (path / "tensors-00007.safetensors").symlink_to("../../../precious")


UNFOLLOWED = "an export publishes no file because a checkpoint names it"
SHAPE = {"num_layers": 10_000, "hidden_size": 16, "num_heads": 2, "ffn_size": 32}
# Forgeries that only an export meets.
EXPORTS = {
    "a template that is a private file": (config("tokenizer", chat_template="../precious"), UNFOLLOWED),
    "a tokenizer in a private folder": (config("tokenizer", path="..", name=None), UNFOLLOWED),
    "a model in a private folder": (config("model", hf_path="..", flavor=None), UNFOLLOWED),
    "a name in Markdown": (config("run", name="x\n# [click](evil)"), "run.name: given"),
    "a name of letters without end": (config("run", name="x" * 10**6), "run.name: given(?s:.{0,2500})$"),
    "no configuration": (state(lambda content: content.pop("config")), "holds no configuration"),
    "a family that does not exist": (config("model", family="evil"), 'model.family: given "evil"'),
    "a shape of words": (config("model", flavor=None, shape={"dim": "big"}), "model.shape"),
    "layers without end": (config("model", family="llama3", flavor=None, shape=SHAPE), "lacks block"),
    "adapters without end": (config("lora", rank=10**9, targets=["q"]), "lora|target|not part of this model"),
    "sources that are words": (config("data", sources=["x"]), "data.sources"),
    "a table too many": (config(evil={}), "unknown table"),
    "tables without number": (config(**{f"t{n}": {} for n in range(20_000)}), r"and 199\d\d more(?s:.{0,2500})$"),
    "sizes of 64 bits without end": (header(first(shape=[2**62] * 200_000)), "has shape"),
    "sizes of 4000 digits": (header(first(shape=[10**4000] * 800)), "has shape"),
    "a tensor of another shape": (header(another_shape), "of another shape"),
    "no tensors": (header(lambda entries: b"{}"), "lacks block"),
}
# Without these, the cases above could pass because every checkpoint is refused.
EXPORTED = {
    "tokens that are a table": (state(tokens={}), "config.json"),
    "a link beside the tensors": (unlisted_link, "config.json"),
}


def test_hostile_checkpoints_are_not_exported_nor_any_file_from_outside(processes, saved, tmp_path):
    def kept(harm):
        def put(folder):
            (folder / "precious").write_bytes(b"precious")
            shutil.copytree(saved / "checkpoints" / checkpoint_name(STEP), folder / "run" / "checkpoints" / "theirs")
            harm(folder / "run" / "checkpoints" / "theirs")

        return put

    arguments = ("run/checkpoints/theirs", "exports/new")
    cases = {name: Case(kept(harm), says, arguments) for name, (harm, says) in {**FILES, **EXPORTS}.items()}
    cases |= {name: Case(kept(harm), says, arguments, 0) for name, (harm, says) in EXPORTED.items()}
    folders = judge(cases, processes, tmp_path, lambda folder: None, writable="exports")
    exported = {name: [*(folder / "exports").rglob("*.*")] for name, folder in folders.items()}
    assert {name for name, files in exported.items() if files} == EXPORTED.keys()
    assert not any(b"precious" in file.read_bytes() for files in exported.values() for file in files)
