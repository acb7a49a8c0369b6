"""README and docs hold: commands and code run, TOML loads, and keys, paths and links exist."""

import re
import shlex
import socket
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.processes import ROOT, run_program
from tests.support.toml import EXTRAS, PROJECT, tomllib
from torchround.config import Config, load_config
from torchround.config.load import all_keys

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Names that stand for a user's own file, or for what a run leaves (a test of the trainer looks for that one).
NOT_OURS = {"model.safetensors", "other.toml", "chats.toml", "config.toml", "metrics.jsonl"}
SHORT_RUN = ["--training.steps=2", "--lr_schedule.warmup_steps=1"]


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str

    def __str__(self):
        return f"{self.page}: {self.text.strip().splitlines()[0][:60]}"


def blocks(language):
    found = []
    for page in PAGES:
        for match in re.finditer(r"^```(\w+)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
            if match[1] == language:
                found.append(Block(page.name, match[1], match[2]))
    return found


def inline_code():
    for page in PAGES:
        prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        yield from ((page.name, code) for code in re.findall(r"`([^`\n]+)`", prose))


COMMANDS = [
    pytest.param(line, id=f"{block.page}: {line}"[:90])
    for block in blocks("sh")
    for line in block.text.replace("\\\n", " ").splitlines()
    if line.strip() and not line.startswith("#")
]


@pytest.fixture
def clone(tmp_path):
    """Make a folder that looks like the repository, so that commands write nothing into the tree."""
    for entry in ROOT.iterdir():
        if entry.name not in ("outputs", "wandb", ".git", ".venv"):
            (tmp_path / entry.name).symlink_to(entry)
    return tmp_path


def run(arguments, folder):
    run_program(*arguments, folder=folder, PET_MASTER_PORT=str(_free_port()))


def _free_port():
    """Find a port for torchrun, which would otherwise use the same one in every run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.documented
@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_runs(line, clone):
    for command in line.split("&&"):
        words = shlex.split(command.strip())
        program, arguments = Path(words[0]).name, words[1:]
        if arguments[:2] == ["-m", "venv"]:
            continue
        if program == "pip":
            assert_installs(arguments)
        elif program in ("torchrun", "python", "python3"):
            run_python(program, arguments, clone)
        elif program == "torchround":
            run(["-c", "from torchround.commands import main; main()", *arguments], clone)
        else:
            pytest.fail(f"no rule how to try {command}")


def assert_installs(arguments):
    assert arguments[:-1] == ["install", "-q", "-c", "constraints.txt", "-e"]
    extras = re.fullmatch(r"\.(?:\[([a-z,]+)\])?", arguments[-1])
    assert extras and (ROOT / "constraints.txt").is_file()
    assert set((extras[1] or "").split(",")) - {""} <= {*EXTRAS}


def run_python(program, arguments, folder):
    if arguments[:2] == ["-m", "pytest"]:
        return  # these very tests
    launcher = ["-m", "torch.distributed.run"] if program == "torchrun" else []
    trains = arguments[0] == "train.py" and not {"--help", "--dry-run", "--print-config"} & set(arguments)
    run([*launcher, *arguments, *(SHORT_RUN if trains else [])], folder)


@pytest.mark.documented
@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_an_example_in_python_runs(block, clone):
    run(["-c", block.text], clone)


@pytest.mark.documented
def test_the_examples_of_what_a_user_adds_are_typed(tmp_path):
    """By the rules of pyproject.toml, as the file of a new optimizer or family would be checked."""
    found = [
        block for block in blocks("python") if re.search(r"^from torchround\.(models|optim)", block.text, re.MULTILINE)
    ]
    assert len(found) >= 2
    for number, block in enumerate(found):
        (tmp_path / f"example_{number}.py").write_text(block.text)
    files = map(str, tmp_path.glob("*.py"))
    run(["-m", "mypy", *files], ROOT)  # which finds pyproject.toml and the cache there


@pytest.mark.parametrize("block", blocks("toml"), ids=str)
def test_an_example_in_toml_loads(block, tmp_path):
    (tmp_path / "debug.toml").write_bytes((ROOT / "configs" / "debug.toml").read_bytes())
    is_whole = re.search(r"^(base|hf_path) =", block.text, re.MULTILINE)
    based = block.text if is_whole else f'base = "debug.toml"\n{block.text}'
    (tmp_path / "example.toml").write_text(based, encoding="utf-8")
    load_config(tmp_path / "example.toml")


@pytest.mark.parametrize("path", sorted((ROOT / "configs").rglob("*.toml")), ids=lambda path: path.name)
def test_a_config_is_legal_headed_by_its_hardware_and_holds_only_what_differs_from_the_defaults(path):
    load_config(path)
    text = path.read_text(encoding="utf-8")
    assert text.startswith("# ")
    for name, table in tomllib.loads(text).items():
        for key, value in table.items() if isinstance(table, dict) else ():
            default = Config.model_fields[name].annotation.model_fields[key].default
            assert value != default, f"{name}.{key} = {value} is the default"


def test_every_key_and_table_that_is_named_exists():
    keys = all_keys()
    checked = 0
    for page, code in inline_code():
        for table, key in re.findall(r"(?:^|--)([a-z_]+)\.([a-z_]+)\b(?!/)", code):
            if table in keys:
                assert key in keys[table] or f"{table}.{key}" in NOT_OURS, f"{page}: {code}"
                checked += 1
        if (table_name := re.fullmatch(r"\[([a-z_]+)\]", code)) is not None:
            assert table_name[1] in keys, f"{page}: {code}"
            checked += 1
        for flag in re.findall(r"--([a-z_]+)\.([a-z_]+)", code):
            assert flag == ("table", "key") or flag[1] in keys.get(flag[0], ()), f"{page}: {code}"
    assert checked > 20


def test_every_dependency_is_pinned():
    def names(requirements):
        return [re.split(r"[^\w-]", line)[0].lower() for line in requirements]

    named = names(PROJECT["dependencies"])
    extras = [package for extra in EXTRAS.values() for package in names(extra)]
    pinned = {line.split("==")[0].lower() for line in (ROOT / "constraints.txt").read_text().splitlines()}
    assert {*named, *extras} <= pinned
