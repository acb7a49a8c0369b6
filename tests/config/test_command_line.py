"""The command line: flags, overrides as TOML values, and mistakes in either."""

import pytest

from torchround.config import ConfigError, parse_command_line


def config(*arguments):
    return parse_command_line(["--config", "debug.toml", *arguments]).config


def refusal(*arguments):
    with pytest.raises(ConfigError) as caught:
        parse_command_line(arguments)
    return str(caught.value)


def test_overrides_are_toml_values_or_bare_words_after_a_space_or_an_equals_sign():
    table = config(
        "--optimizer.betas", "[0.5, 0.75]", "--data.shuffle=false", "--optimizer.lr", "1e-2", "--run.name", '"7"'
    )
    assert (table.optimizer.betas, table.data.shuffle, table.optimizer.lr) == ((0.5, 0.75), False, 0.01)
    assert table.run.name == "7"
    table = config("--training.dtype=bfloat16", "--run.folder", "/tmp/some where/x=1")
    assert (table.training.dtype, table.run.folder) == ("bfloat16", "/tmp/some where/x=1")
    assert config("--training.steps=11", "--training.steps", "12").training.steps == 12
    assert "run.seed: given -1; input" in refusal("--config", "debug.toml", "--run.seed", "-1")


def test_an_array_of_tables_and_a_key_of_a_nested_table_can_be_given():
    sources = config("--data.sources", '[{path = "a.jsonl", weight = 2}, {path = "b"}]').data.sources
    assert [(source.path, source.weight) for source in sources] == [("a.jsonl", 2.0), ("b", 1.0)]
    plan = "{forward = [2], fused = 2, backward = [1, 1]}"
    table = config("--engine.plan", plan, "--engine.plan.rounds", "2").engine.plan
    assert (table.forward, table.rounds) == ((2,), 2)


@pytest.mark.parametrize("text", ["1\nsteps = 2", "1\n[run]\nname = 'x'"])
def test_a_value_cannot_smuggle_in_other_keys(text):
    message = refusal("--config", "debug.toml", "--training.steps", text)
    assert message.startswith("command line: training.steps: given ")


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_names_every_flag_and_ends_well(flag, capsys):
    with pytest.raises(SystemExit) as caught:
        parse_command_line([flag])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(flag in shown for flag in ("--config NAME.toml", "--print-config", "--dry-run", "--table.key VALUE"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "command line: the following arguments are required: --config"),
        (["--config"], "argument --config: expected one argument"),
        (["--confg", "debug.toml"], "command line: the following arguments are required: --config"),
        (["--config", "debug.toml", "steps"], "unexpected argument steps; legal: --config NAME.toml, --print-config, "),
        (["--config", "debug.toml", "--seq_len", "3"], "; nearest: --training.seq_len"),
        (["--dry-run=yes"], "argument --dry-run: ignored explicit argument 'yes'"),
        (["--config", "debug.toml", "--training.steps"], "training.steps: no value"),
        (["--config", "debug.toml", "--training..steps=3"], "unexpected argument --training..steps; legal: "),
        (["--config", "debug.toml", "--data.sources", "[{"], "data.sources: given [{, which is not valid TOML"),
        (["--config", "debug.toml", "--run.folder", "\udcff"], "command line: run.folder: given "),
    ],
)
def test_a_mistake_in_the_arguments_is_one_line_that_says_what_to_write(arguments, expected):
    message = refusal(*arguments)
    assert expected in message and "\n" not in message


def test_a_mistake_found_after_loading_has_the_form_of_all_others(tmp_path):
    options = parse_command_line(["--config", "debug.toml", "--model.family", "lama3"])
    text = str(options.unknown_name("model.family", "lama3", ["qwen3", "llama3"]))
    assert text == 'command line: model.family: given "lama3"; legal: "llama3" or "qwen3"; nearest: llama3'
    assert str(options.error("model.flavor", "unknown")).endswith("debug.toml: model.flavor: unknown")
