"""Finds a tokenizer's chat template, and copies tokenizer and template into an export.

A folder has its template in `chat_template.jinja`, or in `tokenizer_config.json`, as one text or as a list with names.
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

TEMPLATE_FILE, SETTINGS_FILE = "chat_template.jinja", "tokenizer_config.json"
# What other programs read besides `tokenizer.json` goes into an export too.
TOKENIZER_FILES = (
    *("tokenizer.json", SETTINGS_FILE, "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "tokenizer.model"),
)


@dataclass(frozen=True)
class TemplateSource:
    """A tokenizer's chat template as Jinja source, None if there is none, and the file that holds it.

    `settings` are further variables that templates read, such as `enable_thinking`.
    """

    text: str | None = None
    file: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def digest(self) -> str:
        """Hash everything that decides what is written."""
        parts = [self.text or ""]
        # Added only if they are there, so that data positions of runs without them stay valid.
        if self.settings:
            parts.append(json.dumps(dict(self.settings), sort_keys=True))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def find_template(
    given: str | None, folder: Path | None, settings: Mapping[str, Any] | None = None
) -> TemplateSource:
    """Find the template of `tokenizer.chat_template`, otherwise of the tokenizer's folder. Raises `TokenizerError`."""
    settings = settings or {}
    if given is not None:
        path = Path(os.path.expanduser(given))
        return TemplateSource(_read(path, given), path, settings)
    if folder is None:
        return TemplateSource(settings=settings)
    if (folder / TEMPLATE_FILE).is_file():
        return TemplateSource(_read(folder / TEMPLATE_FILE), folder / TEMPLATE_FILE, settings)
    text = read_settings(folder / SETTINGS_FILE).get("chat_template")
    if isinstance(text, list):
        named = {entry.get("name"): entry.get("template") for entry in text if isinstance(entry, dict)}
        text = named.get("default")
    if not isinstance(text, str):
        return TemplateSource(settings=settings)
    return TemplateSource(text, folder / SETTINGS_FILE, settings)


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
    """Copy the files into the folder `target`. Returns their names.

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
        names = (*TOKENIZER_FILES, TEMPLATE_FILE)
        files = {name: place / name for name in names if (place / name).is_file()}
    if given is not None:  # it takes the place of the folder's
        files[TEMPLATE_FILE] = Path(os.path.expanduser(given))
        _read(files[TEMPLATE_FILE], given)
    for name, path in files.items():
        shutil.copyfile(path, target / name)
    return sorted(files)


def folder_of(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _check_template(state: Mapping[str, Any], given: str | None, folder: Path | None) -> None:
    # A run on conversations saves its template's digest with the position in the data; other runs have none.
    trained = ((state.get("data") or {}).get("data") or {}).get("chat_template")
    if trained is None:
        return
    found = find_template(given, folder, state["config"]["tokenizer"].get("chat_template_kwargs"))
    if trained != found.digest():
        raise TokenizerError(
            f"the run trained with another chat template than the one in {found.file or folder}; an export carries the "
            "template of its run: put that one back, or give the folder that holds it as tokenizer.path"
        )
