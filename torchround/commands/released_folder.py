"""The folder of a released model: its `config.json`, whether the run's family reads it, and its weights."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchround.config import MODEL_FOLDER, Options, show
from torchround.hf import HFError, PretrainedWeights, quantised_advice, quantised_kind
from torchround.hf.tensor_folder import read_folder, read_object
from torchround.models import OWN_FAMILIES, KnownShape, ModelConfigError, ModelFamily

logger = logging.getLogger(__name__)

BORROWED = "transformers"
"""The family whose modules `transformers` builds."""


def released_config(options: Options, family: ModelFamily) -> tuple[Path, KnownShape]:
    """Read the folder `model.hf_path`: the path of its `config.json`, and the family's config of it.

    Raises `ConfigError` for a file that is missing or damaged, and for a model that the family does not read.
    """
    path, content = _read_config_json(options)
    _refuse_another_family(options, family, path, content.get("model_type"))
    _refuse_quantised(options, path, content)
    if family.name != BORROWED:
        return path, family.config_from_hf(content)
    try:
        return path, family.config_from_hf(content)
    except ModelConfigError as error:
        raise options.error("model.hf_path", f"{path}: {error}") from error


def open_weights(
    folder: Path, family: ModelFamily, config: Any, shapes: Mapping[str, Sequence[int]]
) -> PretrainedWeights:
    """Open the weights in a folder under the names that it gives them. Raises `HFError` or `ModelConfigError`."""
    tensors = read_folder(folder)
    found = family.names_in_folder(config, tensors)
    return PretrainedWeights(folder, found.names, shapes, found.redundant, tensors=tensors)


def advise_on_borrowed(options: Options) -> None:
    """Warn of what makes a borrowed model slower than it needs to be, or than was asked for."""
    if options.config.model.family != BORROWED:
        return
    if options.config.engine.compile is True:
        logger.warning(
            "engine.compile = true compiles the optimizer's update alone: the layers of model.family = %s run as "
            "transformers wrote them",
            show(BORROWED),
        )
    path, content = _read_config_json(options)
    for family in OWN_FAMILIES.values():
        if content.get("model_type") not in family.hf_model_types:
            continue
        try:
            family.config_from_hf(content)
        except ModelConfigError:
            continue
        logger.warning(
            "model.family = %s runs the modules of transformers; model.family = %s trains %s with kernels of its own, "
            "which are faster",
            *(show(BORROWED), show(family.name), path.parent),
        )


def _read_config_json(options: Options) -> tuple[Path, dict[str, Any]]:
    """Read the config.json of `model.hf_path`. Raises `ConfigError` if it is missing or not a JSON object."""
    folder = options.config.model.hf_path
    assert folder is not None, "the config checks want a flavor, a shape or hf_path"
    path = Path(os.path.expanduser(folder)) / "config.json"
    if not path.is_file():
        lacks = f"no {path}" if path.parent.is_dir() else "no such folder"
        raise options.error("model.hf_path", f"given {show(folder)}, but there is {lacks}; {MODEL_FOLDER}")
    try:
        return path, read_object(path)
    except HFError as error:
        raise options.error("model.hf_path", str(error)) from error


def _refuse_another_family(options: Options, given: ModelFamily, path: Path, model_type: Any) -> None:
    """Raise `ConfigError` if another family reads this type, or none. The message lists what is supported."""
    if given.name == BORROWED or model_type in given.hf_model_types:
        return
    fitting = [family.name for family in OWN_FAMILIES.values() if model_type in family.hf_model_types]
    if fitting:
        raise options.error(
            "model.family",
            f"given {show(options.config.model.family)}, but {path} has model_type {show(model_type)}; "
            f"legal for it: {' or '.join(show(name) for name in fitting)}",
        )
    named = f"model_type {show(model_type)}" if isinstance(model_type, str) else "no model_type"
    supported = "; ".join(
        f"{' or '.join(show(kind) for kind in family.hf_model_types)} with model.family = {show(family.name)}"
        for family in OWN_FAMILIES.values()
    )
    raise options.error(
        "model.hf_path",
        f"{path} has {named}, which no family of torchround reads; legal: {supported}; most decoders of other types "
        f"that transformers defines, with model.family = {show(BORROWED)}",
    )


def _refuse_quantised(options: Options, path: Path, content: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if `config.json` says that the weights are quantised in a form that is not read."""
    kind = quantised_kind(content)
    if kind is not None:
        raise options.error("model.hf_path", f"{path.parent}: {quantised_advice(kind)}")
