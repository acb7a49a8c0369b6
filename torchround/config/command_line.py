"""The command line of `train.py`: the file, the overrides, and the switches that print instead of training."""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from torchround.config.config import Config
from torchround.config.errors import COMMAND_LINE, ConfigError, config_error, nearest, show
from torchround.config.load import read_config
from torchround.config.reference import usage
from torchround.config.usual_names import nearest_value, other_way, usual_key
from torchround.config.validate import RawConfig, all_keys, validate

FLAGS = ("--config", "--print-config", "--dry-run", "--help")


@dataclass(frozen=True)
class Options:
    """The parsed command line."""

    config: Config
    print_config: bool
    """Print the resolved config as TOML, then stop."""

    dry_run: bool
    """Print the plan and the memory it needs, then stop; with `print_config` the resolved config first."""

    raw: RawConfig
    """The tables before they were checked, for the source of each key in a message."""

    def error(self, key: str, message: str) -> ConfigError:
        """Make the error of a mistake found after loading, such as a missing folder, in the form of all others."""
        return config_error(self.raw.source_of(key), key, message)

    def unknown_name(self, key: str, given: str, known: Iterable[str]) -> ConfigError:
        """Make the error of a name that is not among the known ones."""
        names = sorted(known)
        legal = " or ".join(show(name) for name in names)
        return self.error(key, f"given {show(given)}; legal: {legal}{nearest_value(given, names)}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise config_error(COMMAND_LINE, "", message)


def parse_command_line(arguments: Sequence[str]) -> Options:
    """Parse `sys.argv[1:]`. Raises `ConfigError`. `--help` prints the usage and exits with code 0."""
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    for switch in (("--print-config",), ("--dry-run",), ("--help", "-h")):
        parser.add_argument(*switch, action="store_true")
    options, rest = parser.parse_known_args(arguments)
    # Before the file is read: `--help` needs no config.
    if options.help:
        print(usage())
        raise SystemExit(0)
    for before, argument in zip(["", *rest], rest, strict=False):
        flag = argument.partition("=")[0]
        is_value = before.startswith("--") and "=" not in before and not argument.startswith("--")
        if not is_value and not (flag.startswith("--") and "." in flag):
            raise _unknown_argument(argument)
    if len(options.config) != 1:
        given = f"{len(options.config)} configurations are given" if options.config else "no configuration"
        raise config_error(COMMAND_LINE, "", f"{given}; write --config NAME.toml once")
    raw = read_config(options.config[0], rest)
    return Options(validate(raw), options.print_config, options.dry_run, raw)


def _unknown_argument(argument: str) -> ConfigError:
    flag, equals, value = argument.partition("=")
    if not flag.startswith("--") and "." in flag and equals:
        return config_error(
            COMMAND_LINE, "", f"unexpected argument {argument}; a key is written --{flag} {value}"
        )
    name = flag.lstrip("-").rpartition(".")[2]
    keys = [f"--{table}.{key}" for table, names in all_keys().items() for key in names if key == name]
    if not keys and (meant := usual_key(name)):
        keys = [f"--{meant}"]
    hint = f"; nearest: {', '.join(keys)}" if keys else other_way(name) or nearest(flag, FLAGS)
    if not flag.startswith("--"):
        text = f"unexpected argument {flag}; a file is given as --config {flag}, a key as --table.key VALUE"
    else:
        text = f"unknown flag {flag}; legal: {', '.join(FLAGS)}, --table.key"
    return config_error(COMMAND_LINE, "", f"{text}{hint}")
