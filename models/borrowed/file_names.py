"""The tensors in files that hold a borrowed model's parameters, from the conversion tables of `transformers`.

Files name and cut tensors as they did when a family was first released: experts one by one, gate and up apart. The modules
of `transformers` have moved on since. Its loader renames and joins tensors by a table of each family. This file reads the
same tables, so files old and new are read in place, and an export has the names of its base's files.

Two kinds of joins can be read in place: experts that are stacked (`MergeModulelist`), and stacked pairs that are joined
along their rows (`Concatenate`). A family that needs another kind is refused by name.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchround.layer import HFTensors
from torchround.models.common.config import ModelConfigError
from torchround.models.common.family import FolderNames

# The joins that are read in place: operation and dimension, in the order in which the loader applies them.
STACK = (("MergeModulelist", 0),)
STACK_OF_JOINS = (("MergeModulelist", 0), ("Concatenate", 1))


@dataclass(frozen=True)
class _Source:
    """A tensor of a file: its name, and the converter and the pattern that it matched, if it needs one."""

    name: str
    converter: Any = None
    pattern: str | None = None


def names_in_folder(
    model: Any, own: Mapping[str, str], tensors: Collection[str], others: Collection[str] = ()
) -> FolderNames:
    """Map each stored parameter to the `tensors` of a folder that hold it, as the loader of `transformers` would.

    `model` is the whole model of `transformers` on `meta`. `own` maps stored names to the model's own, which a parameter that
    the folder lacks keeps. Tensors of the model's `others`, and those that its class tells the loader to leave out (heads for
    several tokens), are carried. Copies of a tied parameter and tables of rotations are redundant. Raises `ModelConfigError`
    for a join that is not read in place.
    """
    found, left = _sources(model, tensors)
    names = {stored: _names_of(name, found.get(name, []), model) or name for stored, name in own.items()}
    tied = set(getattr(model, "all_tied_weights_keys", {})) - set(own.values())
    copies = {source.name for name in tied for source in found.get(name, [])}
    carried = {source.name for name in others for source in found.get(name, [])} - copies
    carried |= _matching(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or (), left)
    return FolderNames(names, frozenset(copies | _tables(model, left) - carried), frozenset(carried))


def _sources(model: Any, tensors: Collection[str]) -> tuple[dict[str, list[_Source]], set[str]]:
    """Sort tensors by the parameter that each belongs to. The others are returned too."""
    from transformers import conversion_mapping, core_model_loading

    transforms = conversion_mapping.get_model_conversion_mapping(model)
    converters = [one for one in transforms if isinstance(one, core_model_loading.WeightConverter)]
    renamings = [one for one in transforms if isinstance(one, core_model_loading.WeightRenaming)]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    known = model.state_dict()
    prefix = model.base_model_prefix
    found: dict[str, list[_Source]] = defaultdict(list)
    left = set()
    # Experts must come in the order of their numbers.
    for tensor in sorted(tensors, key=core_model_loading.dot_natural_key):
        name, pattern = core_model_loading.rename_source_key(tensor, renamings, converters, prefix, known)
        if name not in known and tensor in known:
            # A file of a newer release holds the model's own name, which a rule for older ones has changed.
            name, pattern = core_model_loading.rename_source_key(tensor, [], [], prefix, known)
        if name in known:
            converter = None if pattern is None else by_pattern[pattern]
            found[name].append(_Source(tensor, converter, pattern))
        else:
            left.add(tensor)
    return found, left


def _names_of(name: str, sources: Sequence[_Source], model: Any) -> HFTensors | None:
    """Find the tensors of one parameter in the form in which they are joined; None if some are missing."""
    if not sources:
        return None
    converter = sources[0].converter
    if converter is None:
        return sources[0].name
    kind = tuple(_kind(operation) for operation in converter.operations)
    if kind not in (STACK, STACK_OF_JOINS):
        operations = ", ".join(type(operation).__name__ for operation in converter.operations)
        raise ModelConfigError(
            f"the files hold {name} as {sources[0].name} and {len(sources) - 1} more, to be joined by {operations}, which torchround does not do "
            "while it reads; legal: what transformers makes of the folder with "
            "AutoModelForCausalLM.from_pretrained(..).save_pretrained(NEW_FOLDER, save_original_format=False)"
        )
    by_pattern = {
        pattern: [source.name for source in sources if source.pattern == pattern]
        for pattern in converter.source_patterns
    }
    num_experts = model.get_parameter(name).shape[0]
    if any(len(some) != num_experts for some in by_pattern.values()):
        return None
    # One entry for each expert: its tensor, or its gate and its up.
    entries = tuple(zip(*by_pattern.values(), strict=True))
    return entries if len(by_pattern) > 1 else tuple(name for (name,) in entries)


def _kind(operation: Any) -> tuple[str, Any]:
    is_sharded = getattr(operation, "num_shards_attribute", None) is not None
    return type(operation).__name__, None if is_sharded else getattr(operation, "dim", None)


def _tables(model: Any, tensors: Collection[str]) -> set[str]:
    """Find the constant tables in old files that no parameter needs and the loader of `transformers` drops."""
    patterns = set()
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")  # one for each block in old files
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    return _matching(patterns, tensors)


def _matching(patterns: Collection[str], tensors: Collection[str]) -> set[str]:
    return {tensor for tensor in tensors if any(re.search(pattern, tensor) for pattern in patterns)}
