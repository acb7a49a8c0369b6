"""One message for everything that is wrong: file, key, given, legal, nearest."""

from pathlib import Path

import pytest

from torchround.config import ConfigError, load_config

VALID = """
[model]
family = "llama3"
flavor = "debug"
[tokenizer]
name = "bytes"
[data]
sources = [{path = "corpus.txt"}]
[training]
steps = 50
global_batch_size = 8
micro_batch_size = 2
"""


def message(folder: Path, text: str, *overrides: str) -> str:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).replace(str(path), "run.toml")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("--training.seq_length=3", "training.seq_length: unknown key, given 3; legal in training: steps, "),
        ("--training.seq_length=3", "; nearest: seq_len"),
        ("--training.lr=3", "; nearest: optimizer.lr"),
        ("--trainig.steps=3", "trainig: unknown table; legal: run, model, "),
        ("--trainig.steps=3", "; nearest: training"),
        ("--training.steps=two", 'training.steps: given "two"; legal: an integer of at least 1'),
        ("--training.steps=-2", "training.steps: given -2; legal: an integer of at least 1"),
        ("--training.steps=1.5", "training.steps: given 1.5; legal: an integer"),
        ("--training.steps=true", "training.steps: given true; legal: an integer"),
        ("--training.steps=2024-01-01", "training.steps: given 2024-01-01; legal: an integer"),
        ("--training.steps=9223372036854775808", "at most 9223372036854775807"),
        ("--training.steps=0x" + "f" * 5000, "training.steps: given an integer too long to print"),
        ("--optimizer.lr=inf", "optimizer.lr: given inf; legal: a number above 0"),
        ("--optimizer.betas=[0.9]", "optimizer.betas: given [0.9]; legal: an array of 2, each element a number"),
        ("--optimizer.betas=[0.9, 2]", "optimizer.betas[1]: given 2; legal: a number of at least 0 and below 1"),
        (
            "--engine.update=asyncc",
            'engine.update: given "asyncc"; legal: "sync" or "async" or "bounded"; nearest: async',
        ),
        (
            "--engine.update=Async",
            'engine.update: given "Async"; legal: "sync" or "async" or "bounded"; nearest: async',
        ),
        ("--engine.rounds=autoo", 'given "autoo"; legal: an integer of at least 1 or "auto"; nearest: auto'),
        (
            "--engine.plan=3",
            "engine.plan: given 3; legal: a table {forward, fused, backward, rounds, kept} or a string",
        ),
        ("--engine.plan={fused=0}", "engine.plan.forward: missing; legal: an array, each element an integer"),
        ("--engine.plan.fused=0", "engine.plan.fused: given 0; legal: an integer of at least 1"),
        ("--data.sources=[]", "data.sources: given []; legal: an array of at least 1, each element a table"),
        ("--data.sources=[{}]", "data.sources[0].path: missing; legal: a string"),
        ('--data.sources=[{path="a"}, {path=1}]', "data.sources[1].path: given 1; legal: a string"),
        ('--data.sources=[{pathh="a"}]', "data.sources[0].pathh: unknown key"),
        ("--data.shuffle=yes", 'data.shuffle: given "yes"; legal: true or false'),
        ("--run.name=7", "run.name: given 7; legal: a string"),
        ("--run.name=7", """; as a string: --run.name '"7"'"""),
        ("--run.name=a/b", 'run.name: given "a/b"; legal: a string of letters, digits, '),
        ("--training.dtype=float64", 'training.dtype: given "float64"; legal: "float32" or "bfloat16" or "float16"'),
    ],
)
def test_a_mistake_on_the_command_line_is_named_with_what_is_legal(
    tmp_path: Path, override: str, expected: str
) -> None:
    lines = message(tmp_path, VALID, override).splitlines()
    assert any(line.strip().startswith("command line: ") and expected in line for line in lines), lines


def test_a_mistake_in_a_file_is_one_line_that_begins_with_the_file(tmp_path: Path) -> None:
    text = VALID.replace("steps = 50", 'steps = "50"')
    assert message(tmp_path, text) == 'run.toml: training.steps: given "50"; legal: an integer of at least 1'


def test_the_command_line_is_blamed_only_for_what_it_gave(tmp_path: Path) -> None:
    text = VALID.replace("steps = 50", "steps = 0")
    lines = message(tmp_path, text, "--training.seq_len=0").splitlines()
    assert [line.split(": ")[:2] for line in lines[1:]] == [
        ["  run.toml", "training.steps"],
        ["  command line", "training.seq_len"],
    ]


def test_all_missing_required_keys_are_named(tmp_path: Path) -> None:
    lines = message(tmp_path, "").splitlines()
    assert lines == [
        "2 problems in the configuration",
        "  run.toml: model.family: missing; legal: a string of at least 1 character",
        "  run.toml: data.sources: missing; legal: an array of at least 1, each element a table "
        + "{path, format, content, field, weight, special_tokens, split, subset}",
    ]


def test_a_value_in_place_of_a_table_is_refused_with_the_way_to_write_a_table(tmp_path: Path) -> None:
    text = "training = 3\n" + VALID.partition("[training]")[0]
    assert message(tmp_path, text) == "run.toml: training: given 3; legal: a table, written [training]"


def test_a_long_value_is_shortened(tmp_path: Path) -> None:
    line = message(tmp_path, VALID, f"--training.steps={'x' * 500}")
    assert len(line) < 200 and "..." in line


CONFLICTS = [
    ({"model.hf_path": "folder"}, ["model.flavor", "model.hf_path"], ["debug", "folder"]),
    ({"model.flavor": "none"}, ["model.flavor", "model.shape", "model.hf_path"], ["none is given"]),
    ({"tokenizer.path": "folder"}, ["tokenizer.path", "tokenizer.name"], ["folder", "bytes"]),
    ({"tokenizer.name": "none"}, ["tokenizer.path", "tokenizer.name", "model.hf_path"], ["no tokenizer"]),
    ({"training.micro_batch_size": "9"}, ["training.micro_batch_size", "training.global_batch_size"], ["9 and 8"]),
    (
        {"engine.delay_correction": "predict", "engine.update": "sync"},
        ["engine.delay_correction", "engine.update"],
        ['given "predict" and "sync"', 'update = "async"'],
    ),
    (
        {"engine.update": "bounded"},
        ["engine.update", "training.clip", "training.max_norm"],
        ['given "bounded", "global" and 1.0', 'clip = "layer", or training.max_norm = 0'],
    ),
    (
        {"engine.update": "bounded", "training.clip": "layer", "training.dtype": "float16"},
        ["engine.update", "training.dtype"],
        ['"float16"', '"bfloat16" or "float32"'],
    ),
    (
        {"engine.update": "bounded", "training.max_norm": "0", "engine.rounds": "2"},
        ["engine.rounds", "engine.update"],
        ["2 rounds", "1 round"],
    ),
    (
        {
            "engine.update": "bounded",
            "training.clip": "layer",
            "engine.plan": "{forward=[1],fused=1,backward=[1],rounds=2}",
        },
        ["engine.plan", "engine.update"],
        ["2 rounds"],
    ),
    (
        {"engine.update": "bounded", "training.clip": "layer", "engine.delay_correction": "predict"},
        ["engine.delay_correction", "engine.update"],
        ['given "predict" and "bounded"'],
    ),
    (
        {"optimizer.name": "muon", "engine.update": "async", "engine.delay_correction": "predict"},
        ["engine.delay_correction", "optimizer.name"],
        ['given "predict" and "muon"', '"auto" or "none"'],
    ),
    (
        {"optimizer.name": "muon", "engine.update": "bounded", "training.clip": "layer"},
        ["engine.update", "optimizer.name"],
        ['given "bounded" and "muon"', '"sync" or "async"'],
    ),
    ({"engine.stale_layers": "3"}, ["engine.stale_layers", "engine.update"], ['given 3 and "sync"', '"auto"']),
    ({"engine.rounds": "5"}, ["engine.rounds", "training.global_batch_size"], ["5 rounds", "1 to 4"]),
    ({"engine.plan": "{forward=[1],fused=1,backward=[1],rounds=5}"}, ["engine.plan"], ["5 rounds", "1 to 4"]),
    (
        {"engine.plan": "{forward=[1],fused=1,backward=[1],rounds=2}", "engine.rounds": "3"},
        ["engine.rounds", "engine.plan"],
        ["3 and 2"],
    ),
    ({"engine.plan": "{forward=[1,1],fused=1,backward=[1]}"}, ["engine.plan"], ["2 layers", "1"]),
    (
        {"lr_schedule.warmup_steps": "50"},
        ["lr_schedule.warmup_steps", "training.steps"],
        ["50 and 50", "49", "for example --lr_schedule.warmup_steps 5"],
    ),
    ({"lora.path": "folder"}, ["lora.path", "lora.rank"], ["folder", "0"]),
    ({"lora.path": "folder", "lora.rank": "4"}, ["lora.path", "model.hf_path"], ["no folder"]),
    ({"checkpoint.load": '"weights"'}, ["checkpoint.load", "checkpoint.load_path"], ["no folder"]),
    ({"validation.interval_steps": "5"}, ["validation.interval_steps", "validation.sources"], ["no sources"]),
]


@pytest.mark.parametrize(("values", "keys", "words"), CONFLICTS, ids=lambda part: str(part)[:60])
def test_a_conflict_between_keys_names_the_keys_and_the_values(
    tmp_path: Path, values: dict[str, str], keys: list[str], words: list[str]
) -> None:
    text = message(tmp_path, VALID, *(f"--{key}={value}" for key, value in values.items()))
    assert "\n" not in text and "command line" in text
    assert all(part in text for part in [*keys, *words, "legal: "]), text


@pytest.mark.parametrize(
    "overrides",
    [
        ["--model.flavor=none", "--model.hf_path=folder"],
        ["--tokenizer.name=none", "--tokenizer.path=folder"],
        ["--model.flavor=none", "--model.hf_path=folder", "--tokenizer.name=none"],
        ["--training.micro_batch_size=8"],
        ["--training.micro_batch_size=3", "--engine.rounds=3"],
        ["--engine.plan={forward=[],fused=3,backward=[],rounds=4}", "--engine.rounds=4"],
        ["--engine.update=bounded", "--training.clip=layer", "--engine.stale_layers=2", "--engine.rounds=1"],
        ["--engine.update=bounded", "--training.max_norm=0", "--engine.rounds=auto"],
        ["--lr_schedule.warmup_steps=49"],
        ["--validation.interval_steps=5", '--validation.sources=[{path="x"}]'],
    ],
)
def test_combinations_at_the_edge_of_what_is_legal_are_accepted(tmp_path: Path, overrides: list[str]) -> None:
    path = tmp_path / "run.toml"
    path.write_text(VALID, encoding="utf-8")
    load_config(path, overrides)


def test_all_conflicts_of_one_load_are_in_one_message(tmp_path: Path) -> None:
    lines = message(tmp_path, VALID, "--model.hf_path=x", "--training.micro_batch_size=9").splitlines()
    assert lines[0] == "2 problems in the configuration" and len(lines) == 3


def test_a_conflict_names_every_source_of_its_keys(tmp_path: Path) -> None:
    text = message(tmp_path, VALID, "--training.micro_batch_size=9")
    assert text.startswith("command line and run.toml: training.micro_batch_size, training.global_batch_size: ")


def test_a_mistake_inside_a_table_is_not_repeated_for_the_table(tmp_path: Path) -> None:
    lines = message(tmp_path, VALID, "--engine.plan={forward = [1], fused = 0, backward = [1]}").splitlines()
    assert lines == ["command line: engine.plan.fused: given 0; legal: an integer of at least 1"]
