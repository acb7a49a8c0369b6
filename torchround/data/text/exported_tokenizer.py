"""Copies a run's tokenizer, and the chat templates that it trained with, into an export."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchround.data.errors import TokenizerError
from torchround.data.text.template_files import exported_files, find_templates


def export_tokenizer(
    target: Path, state: Mapping[str, Any], base: Path | None, moved: Path | None = None
) -> list[str]:
    """Copy the files into the folder `target`. Returns their names, relative to it.

    `state` is what a checkpoint holds of its run: its config, and the position in its data. `base` is the model's folder,
    whose tokenizer a run uses unless its config names another one. `moved` is a folder that has taken the place of the
    run's. Raises `TokenizerError` if a run on conversations had another template than the one that is found now.
    """
    table = state["config"]["tokenizer"]
    given = table.get("chat_template")
    if moved is not None and given is not None and not Path(given).expanduser().is_file():
        given = None  # the folder that is given holds the template too
    folder = moved or table["path"] or (None if table.get("name") else base)
    place = None if folder is None else _folder(Path(folder).expanduser())
    _check_template(state, given, place)
    files = exported_files(given, place)
    for name, path in files.items():
        (target / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target / name)
    return sorted(files)


def _folder(path: Path) -> Path:
    """Return the folder of a tokenizer, which may be given as a file."""
    folder = path if path.is_dir() else path.parent
    return folder.parent if folder.name == "original" else folder


def _check_template(state: Mapping[str, Any], given: str | None, folder: Path | None) -> None:
    # A run on conversations saves its template's digest with the position in the data; other runs have none.
    data = state.get("data")
    identity = data.get("data") if isinstance(data, dict) else None
    trained = identity.get("chat_template") if isinstance(identity, dict) else None
    if trained is None:
        return
    templates = find_templates(given, folder, state["config"]["tokenizer"].get("chat_template_kwargs"))
    if templates.digest() != trained:
        raise TokenizerError(
            f"the run trained with another chat template than the one in {templates.file or folder}; an export carries the "
            "template of its run: put that one back, or name a folder that holds it with --tokenizer"
        )
