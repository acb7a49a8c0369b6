"""Finds a tokenizer's chat templates, and copies tokenizer and templates into an export.

A folder holds templates in one of two ways. `chat_template.jinja` is the default, and each file of
`additional_chat_templates/` has another name. Older folders have them in `tokenizer_config.json`, as one text or as a
list with names. Files come first, as in transformers.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchround.config import show
from torchround.data.document_types import MissingTokenizerError, TokenizerError

TEMPLATE_FILE, MORE_TEMPLATES, SETTINGS_FILE = (
    "chat_template.jinja",
    "additional_chat_templates",
    "tokenizer_config.json",
)
DEFAULT, WITH_TOOLS = "default", "tool_use"
# What other programs read besides `tokenizer.json` goes into an export too.
TOKENIZER_FILES = (
    *("tokenizer.json", SETTINGS_FILE, "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model"),
)


@dataclass(frozen=True)
class TemplateSources:
    """A tokenizer's chat templates as Jinja source.

    `default` writes conversations, and `with_tools`, if there is one, the conversations that offer tools. Both are None
    if there is no template. `file` is the file that holds the templates. `settings` are further variables that templates
    read, such as `enable_thinking`.
    """

    default: str | None = None
    with_tools: str | None = None
    file: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def digest(self) -> str:
        """Return a short hash of everything that decides what is written."""
        parts = [self.default or ""]
        # Parts are added only if they are there, so that data positions of runs without them stay valid.
        if self.with_tools is not None:
            parts.append(self.with_tools)
        if self.settings:
            parts.append(json.dumps(dict(self.settings), sort_keys=True))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def find_templates(
    given: str | None, folder: Path | None, settings: Mapping[str, Any] | None = None
) -> TemplateSources:
    """Find the template that the key `tokenizer.chat_template` gives, otherwise the templates of a tokenizer's folder.

    A template of the key writes all conversations. Raises `TokenizerError` if a file is missing or cannot be read.
    """
    settings = settings or {}
    if given is not None:
        path = Path(os.path.expanduser(given))
        return TemplateSources(_read(path, given), file=path, settings=settings)
    if folder is None:
        return TemplateSources(settings=settings)
    named, file = _named_templates(folder)
    return TemplateSources(named.get(DEFAULT), named.get(WITH_TOOLS), file, settings)


def read_settings(path: Path) -> dict[str, Any]:
    """Read a `tokenizer_config.json`; a file that is not there has no settings. Raises `TokenizerError`."""
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise TokenizerError(f"{path}: a JSON {type(settings).__name__}, not an object")
    return settings


def _named_templates(folder: Path) -> tuple[dict[str, str], Path | None]:
    default, more = folder / TEMPLATE_FILE, sorted((folder / MORE_TEMPLATES).glob("*.jinja"))
    named = {path.stem: _read(path) for path in more}
    if default.is_file():
        return named | {DEFAULT: _read(default)}, default
    settings = folder / SETTINGS_FILE
    found = read_settings(settings).get("chat_template")
    if isinstance(found, str):
        found = [{"name": DEFAULT, "template": found}]
    entries = [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
    in_settings = {
        entry["name"]: entry["template"]
        for entry in entries
        if isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
    if in_settings:
        return in_settings | named, settings
    return named, folder / MORE_TEMPLATES if named else None


def _read(path: Path, given: str | None = None) -> str:
    """Read a template. `given` is the value of `tokenizer.chat_template`, if the path comes from there."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        if given is None:
            raise TokenizerError(f"chat template {path}: cannot be read: {error}") from error
        raise MissingTokenizerError(
            "tokenizer.chat_template",
            f"given {show(given)}, which cannot be read: {error}; legal: a file with a Jinja template, in UTF-8",
        ) from error


# Exports.


def export_tokenizer(
    target: Path, state: Mapping[str, Any], base: Path | None, tokenizer: Path | None = None
) -> list[str]:
    """Copy the files into the folder `target`. Returns their names, relative to it.

    `state` is what a checkpoint holds of its run: its config, with paths that the user gave, and the position in its
    data. `base` is the model's folder, whose tokenizer a run uses unless there is another one. Raises `TokenizerError` if a run
    on conversations had another template than the one that is found now.
    """
    table = state["config"]["tokenizer"]
    given = table.get("chat_template")
    folder = tokenizer or (None if table.get("name") else base)
    place = None if folder is None else folder_of(folder)
    _check_template(state, given, place)
    files = {}
    if place is not None:
        names = [*TOKENIZER_FILES, *([] if given else [TEMPLATE_FILE])]
        files = {name: place / name for name in names if (place / name).is_file()}
        more = [] if given else sorted((place / MORE_TEMPLATES).glob("*.jinja"))
        files |= {str(path.relative_to(place)): path for path in more}
    if given is not None:  # it takes the place of the folder's
        files[TEMPLATE_FILE] = Path(os.path.expanduser(given))
        _read(files[TEMPLATE_FILE], given)
    for name, path in files.items():
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target / name)
    return sorted(files)


def folder_of(path: Path) -> Path:
    """Return the folder of a tokenizer, which may be given as a file."""
    return path if path.is_dir() else path.parent


def _check_template(state: Mapping[str, Any], given: str | None, folder: Path | None) -> None:
    # A run on conversations saves its template's digest with the position in the data; other runs have none.
    data = state.get("data")
    identity = data.get("data") if isinstance(data, dict) else None
    trained = identity.get("chat_template") if isinstance(identity, dict) else None
    if trained is None:
        return
    templates = find_templates(given, folder, state["config"]["tokenizer"].get("chat_template_kwargs"))
    # Runs of earlier versions used the default alone.
    if trained not in (templates.digest(), TemplateSources(templates.default).digest()):
        raise TokenizerError(
            f"the run trained with another chat template than the one in {templates.file or folder}; an export carries the "
            "template of its run: put that one back, or give the folder that holds it as tokenizer.path"
        )
