"""Names that users bring from other trainers lead to the key or value here."""

import pytest

from tests.config.test_messages import VALID, message
from torchround.config import ConfigError, parse_command_line
from torchround.config.config import Config
from torchround.config.key_types import KeyType
from torchround.config.usual_names import USUAL_KEYS, USUAL_VALUES
from torchround.config.validate import all_keys

# Values that no type lists: the kinds of accelerator.
OTHER_VALUES = {"auto"}


def every_choice() -> list[set[str]]:
    """Return the strings that each key lists as legal."""
    found = [set(OTHER_VALUES)]
    waiting = [KeyType.of_field(info) for info in Config.model_fields.values()]
    while waiting:
        table = waiting.pop().table()
        for info in table.model_fields.values() if table else ():
            key_type = KeyType.of_field(info)
            found.append(set(key_type.choices()))
            waiting += [key_type, *filter(None, [key_type.item()])]
    return found


@pytest.mark.parametrize("usual", USUAL_KEYS)
def test_each_usual_key_leads_to_a_key_that_exists_and_is_none_itself(usual):
    table, _, key = USUAL_KEYS[usual].partition(".")
    assert key in all_keys()[table]
    assert usual == usual.lower() and not any(usual in names for names in all_keys().values())


@pytest.mark.parametrize("usual", USUAL_VALUES)
def test_each_usual_value_leads_to_one_that_a_key_lists(usual):
    """A key may list the usual value with another meaning, but not beside the one that it leads to."""
    meant = [choices for choices in every_choice() if USUAL_VALUES[usual] in choices]
    assert meant and all(usual not in choices for choices in meant)


def test_messages_name_the_key_here_wherever_the_usual_one_is_written(tmp_path):
    for override in ("--training.learning_rate=1", "--optimizer.learning-rate=1", "--optimizer.LEARNING_RATE=1"):
        assert message(tmp_path, VALID, override).endswith("; nearest: optimizer.lr")
    assert "; nearest: optimizer.lr" in message(tmp_path, "learning_rate = 1\n" + VALID)
    with pytest.raises(ConfigError, match=r"unknown flag --max_steps; .*; nearest: --training\.steps$"):
        parse_command_line(["--config", "debug.toml", "--max_steps", "3"])


def test_messages_name_the_value_here(tmp_path):
    assert message(tmp_path, VALID, "--training.dtype=fp16").endswith("; nearest: float16")
    assert message(tmp_path, VALID, "--training.dtype=BF16").endswith("; nearest: bfloat16")
    assert message(tmp_path, VALID, "--lr_schedule.decay=constant").endswith("; nearest: none")
