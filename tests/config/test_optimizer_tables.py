"""`[optimizer]`: the name chooses the table, and messages speak of the chosen one."""

from pathlib import Path

import pytest

from torchround.config import AdamWTable, ConfigError, load_config, to_toml

MODEL = (
    '[model]\nfamily = "llama3"\nflavor = "debug"\n[tokenizer]\nname = "bytes"\n[data]\nsources = [{ path = "x" }]\n'
)


def written(folder: Path, optimizer: str) -> Path:
    path = folder / "run.toml"
    path.write_text(f"{MODEL}[optimizer]\n{optimizer}\n")
    return path


@pytest.mark.parametrize("keys", ["", 'name = "adamw"\n', 'name = "adamw"\nstate = "compact"\n'])
def test_adamw_is_the_default_and_every_key_comes_back_from_toml(tmp_path: Path, keys: str) -> None:
    config = load_config(written(tmp_path, f"{keys}betas = [0.8, 0.9]\nlr = 1e-2"))
    assert isinstance(config.optimizer, AdamWTable)
    assert (config.optimizer.betas, config.optimizer.lr) == ((0.8, 0.9), 1e-2)
    again = tmp_path / "again.toml"
    again.write_text(to_toml(config))
    assert load_config(again).optimizer == config.optimizer
    assert 'name = "adamw"' in to_toml(config)


def test_flags_of_the_command_line_reach_the_chosen_table(tmp_path: Path) -> None:
    config = load_config(written(tmp_path, ""), ["--optimizer.betas=[0.5, 0.6]", "--optimizer.state=compact"])
    assert isinstance(config.optimizer, AdamWTable)
    assert (config.optimizer.betas, config.optimizer.state) == ((0.5, 0.6), "compact")


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ('name = "adam"\nmomentum = 0.5', 'optimizer.name: given "adam"; legal: "adamw"'),
        ("name = 3", 'optimizer.name: given 3; legal: "adamw"'),
        ('state = "small"', 'optimizer.state: given "small"; legal: "exact" or "compact"'),
        ("beta = 0.9", "optimizer.beta: unknown key, given 0.9; legal in optimizer: name, lr, "),
        ("adamw_eps = 1e-8", "optimizer.adamw_eps: unknown key, given 1e-08; legal in optimizer: name, lr, "),
        ("betas = [0.9, 1.0]", "optimizer.betas[1]: given 1.0; legal: a number of at least 0 and below 1"),
        ("betas = [0.9]", "optimizer.betas: given [0.9]; legal: an array of 2, each element a number"),
        ("lr = 0", "optimizer.lr: given 0; legal: a number above 0"),
    ],
)
def test_a_mistake_is_named_once_with_what_the_chosen_optimizer_allows(
    tmp_path: Path, keys: str, expected: str
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(written(tmp_path, keys))
    assert expected in str(error.value)
    assert str(error.value).count("optimizer.") == expected.count("optimizer.") + str(error.value).count(
        "nearest: optimizer."
    ), "other lines than the expected one"


def test_a_key_of_another_optimizer_is_named_as_that(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='betas, eps; it is a key of optimizer.name = "muon"'):
        load_config(written(tmp_path, "momentum = 0.9"))


def test_an_optimizer_that_is_no_table_is_refused_as_before(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"optimizer = 3\n{MODEL}")
    with pytest.raises(ConfigError, match=r"optimizer: given 3; legal: a table, written \[optimizer\]"):
        load_config(path)
