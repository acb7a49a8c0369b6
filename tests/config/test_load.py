"""Files: look-up, inheritance, and what is wrong with a file as a whole."""

import os

import pytest

from tests.support.toml import MINIMAL, tomllib
from torchround.config import ConfigError, load_config
from torchround.config.load import GONE_KEYS, RawConfig, validate


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_file_is_looked_up_as_given_then_in_configs_of_the_working_directory(here):
    assert load_config("debug.toml").engine.devices == "cpu"  # from any directory
    write(here, "configs/a.toml", MINIMAL + "[run]\nseed = 2")
    assert load_config("a.toml").run.seed == 2
    write(here, "a.toml", MINIMAL + "[run]\nseed = 1")
    assert load_config("a.toml").run.seed == 1


def test_a_missing_file_is_named_with_every_path_that_was_tried(here):
    message = refusal("nowhere.toml")
    assert message.startswith("nowhere.toml: no such file")
    assert os.path.join("configs", "nowhere.toml") in message
    for folder in ("", ".", "/", here):
        assert "no such file" in refusal(folder)


def test_a_base_is_relative_to_the_file_that_names_it_and_may_have_a_base(tmp_path):
    write(tmp_path, "common/root.toml", MINIMAL + "[run]\nseed = 3")
    write(tmp_path, "common/middle.toml", 'base = "root.toml"\n[training]\nsteps = 9')
    config = load_config(write(tmp_path, "runs/leaf.toml", 'base = "../common/middle.toml"'))
    assert (config.run.seed, config.training.steps) == (3, 9)


def test_a_base_that_is_not_beside_the_file_is_looked_up_in_configs_as_a_config_is(here):
    write(here, "configs/root.toml", MINIMAL + "[training]\nsteps = 7")
    ours = write(here, "elsewhere/mine.toml", 'base = "root.toml"')
    assert load_config(ours).training.steps == 7
    write(here, "elsewhere/root.toml", MINIMAL + "[training]\nsteps = 8")
    assert load_config(ours).training.steps == 8
    assert load_config(write(here, "elsewhere/other.toml", 'base = "debug.toml"')).engine.devices == "cpu"
    missing = write(here, "child.toml", 'base = "gone.toml"')
    message = refusal(missing)
    assert message.startswith(f"{missing}: base: no such file; looked for ") and "gone.toml" in message
    assert "base: given 3; legal: the path of a TOML file" in refusal(write(here, "child.toml", "base = 3"))


def test_a_list_of_sources_and_a_plan_replace_their_base_as_a_whole(tmp_path):
    plan = "[engine]\nplan = {forward = [2], fused = 1, backward = [2], rounds = 2}"
    write(tmp_path, "base.toml", MINIMAL + plan)
    text = (
        'base = "base.toml"\n[engine]\nplan = {forward = [1], fused = 2, backward = [1]}\n[[data.sources]]\npath = "x"'
    )
    config = load_config(write(tmp_path, "child.toml", text))
    assert [source.path for source in config.data.sources] == ["x"]
    assert config.engine.plan is not None and not isinstance(config.engine.plan, str)
    assert config.engine.plan.rounds is None


def test_a_cycle_of_bases_is_refused(tmp_path):
    for name, base in {"a.toml": "b.toml", "b.toml": "c.toml", "c.toml": "a.toml"}.items():
        write(tmp_path, name, f'base = "{base}"')
    message = refusal(tmp_path / "a.toml")
    assert "\n" not in message and message.startswith(f"{tmp_path}") and "at most 20 files in a chain" in message


def test_a_mistake_in_a_base_names_the_base(tmp_path):
    base = write(tmp_path, "base.toml", MINIMAL + '[training]\nsteps = "many"')
    child = write(tmp_path, "child.toml", 'base = "base.toml"\n[training]\nseq_len = 0')
    first, second = sorted(refusal(child).splitlines()[1:])
    assert first.startswith(f"  {base}: training.steps")
    assert second.startswith(f"  {child}: training.seq_len")


def test_a_run_is_named_after_its_file_and_never_after_its_base(tmp_path):
    base = write(tmp_path, "base.toml", MINIMAL + '[run]\nname = "first"')
    child = write(tmp_path, "second run.toml", 'base = "base.toml"')
    assert load_config(base).run.name == "first"
    assert load_config(child).run.name == "second-run"
    assert load_config(child, ["--run.name", "third"]).run.name == "third"


def test_none_clears_a_key_that_a_base_set(tmp_path):
    write(tmp_path, "base.toml", MINIMAL)
    child = write(tmp_path, "child.toml", 'base = "base.toml"\n[model]\nflavor = "none"\nhf_path = "folder"')
    assert (load_config(child).model.flavor, load_config(child).model.hf_path) == (None, "folder")
    command_line = load_config(tmp_path / "base.toml", ["--model.flavor", "none", "--model.hf_path=folder"])
    assert command_line.model == load_config(child).model


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"[training\nsteps = 1", "not valid TOML"),
        (b"[training]\nsteps = 1\nsteps = 2", "not valid TOML"),
        (b"[training]\nsteps = " + b"9" * 5000, "not valid TOML"),
        (b"a = " + b"[" * 100_000, "not valid TOML"),
        (b"\xff\xfe", "not valid TOML: 'utf-8' codec"),
    ],
)
def test_a_file_that_is_not_toml_is_refused_with_its_name(tmp_path, content, expected):
    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    message = refusal(path)
    assert message.startswith(f"{path}: {expected}") and "\n" not in message


def test_keys_that_are_gone_are_dropped_from_a_saved_config_and_said_if_they_were_set(caplog, monkeypatch):
    monkeypatch.setitem(GONE_KEYS, "trace.memory", False)
    saved = tomllib.loads(MINIMAL) | {"trace": {"memory": False}}
    validate(RawConfig("state.json", saved))
    assert not caplog.records
    saved["trace"]["memory"] = True
    validate(RawConfig("state.json", saved))
    assert caplog.messages == ["state.json: trace.memory is no longer a key; its value true is not used"]
