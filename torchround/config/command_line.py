"""The command line of `train.py`: the file, the overrides, and the switches that print instead of training."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torchround.config.config import Config
from torchround.config.errors import COMMAND_LINE, ConfigError, config_error, nearest, show
from torchround.config.load import read_config, take_flag
from torchround.config.reference import usage
from torchround.config.usual_names import nearest_value, other_way, usual_key
from torchround.config.validate import RawConfig, all_keys, validate

SWITCHES = ("--print-config", "--dry-run", "--help")
FLAGS = ("--config", *SWITCHES)


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

    @property
    def is_named_on_command_line(self) -> bool:
        """Whether `--run.name` names the run. Otherwise a file does, by its own name or by the key."""
        return self.raw.source_of("run.name") == COMMAND_LINE

    def error(self, key: str, message: str) -> ConfigError:
        """Make the error of a mistake found after loading, such as a missing folder, in the form of all others."""
        return config_error(self.raw.source_of(key), key, message)

    def unknown_name(self, key: str, given: str, known: Iterable[str]) -> ConfigError:
        """Make the error of a name that is not among the known ones."""
        names = sorted(known)
        legal = " or ".join(show(name) for name in names)
        return self.error(key, f"given {show(given)}; legal: {legal}{nearest_value(given, names)}")


def parse_command_line(arguments: Sequence[str]) -> Options:
    """Parse `sys.argv[1:]`. Raises `ConfigError`. `--help` prints the usage and exits with code 0."""
    path: str | None = None
    switches: set[str] = set()
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        name = rest[0].partition("=")[0]
        if name in SWITCHES or rest[0] == "-h":
            switches.add(_switch(rest.pop(0)))
        elif name == "--config":
            path = _config_path(rest, path)
        else:
            overrides.extend(_override(rest))
    # Before the file is read: `--help` needs no config.
    if "--help" in switches:
        print(usage())
        raise SystemExit(0)
    if path is None:
        raise config_error(COMMAND_LINE, "", "no configuration; write --config NAME.toml")
    raw = read_config(path, overrides)
    return Options(validate(raw), "--print-config" in switches, "--dry-run" in switches, raw)


def _switch(argument: str) -> str:
    """Return the switch's long name."""
    name, equals, value = argument.partition("=")
    if equals:
        raise config_error(COMMAND_LINE, "", f"{name} takes no value, given {value}")
    return "--help" if name == "-h" else name


def _config_path(rest: list[str], earlier: str | None) -> str:
    """Remove `--config` and its value from the front. `earlier` is the value given before it, if any."""
    _, value = take_flag(rest)
    if not value:
        raise config_error(COMMAND_LINE, "", "--config has no value; write --config NAME.toml")
    if earlier is not None:
        raise config_error(COMMAND_LINE, "", f"--config is given twice: {earlier} and {value}")
    return value


def _override(rest: list[str]) -> list[str]:
    """Remove an override from the front. Returns it as one argument, or as a flag without a value."""
    flag, value = take_flag(rest)
    if not flag.startswith("--") and "." in flag and value is not None:
        raise config_error(
            COMMAND_LINE, "", f"unexpected argument {flag}={value}; a key is written --{flag} {value}"
        )
    if not flag.startswith("--") or "." not in flag:
        raise _unknown_flag(flag)
    return [flag] if value is None else [f"{flag}={value}"]


def _unknown_flag(flag: str) -> ConfigError:
    name = flag.lstrip("-")
    keys = [f"--{table}.{key}" for table, names in all_keys().items() for key in names if key == name]
    if not keys and (meant := usual_key(name)):
        keys = [f"--{meant}"]
    hint = f"; nearest: {', '.join(keys)}" if keys else other_way(name) or nearest(flag, FLAGS)
    if not flag.startswith("--"):
        return config_error(
            COMMAND_LINE, "", f"unexpected argument {flag}; a file is given as --config {flag}{hint}"
        )
    return config_error(
        COMMAND_LINE, "", f"unknown flag {flag}; legal: {', '.join(FLAGS)}, --table.key{hint}"
    )
