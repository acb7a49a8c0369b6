"""What a model family offers to the rest of the program, as one table of functions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from torchround.layer import LayeredModel
from torchround.models.common.config import TransformerConfig
from torchround.models.common.errors import ModelConfigError, unknown_name

# The tensor of a Hugging Face file that holds a parameter, or several, to be stacked along a new first dimension
# (one tensor for each expert).
HFTensors = str | tuple[str, ...]
# `"<layer>.<parameter>"`, as the host store names it, to its tensors.
HFNames = dict[str, HFTensors]

Config = TypeVar("Config", bound=TransformerConfig)


@dataclass(frozen=True)
class Family(Generic[Config]):
    """A family's public face.

    `flavors`: published sizes by name. `config_from_hf`: from the content of a Hugging Face `config.json`;
    raises `ModelConfigError`. `build`: the layers, on `meta`. `hf_names`: where Hugging Face files hold each
    stored parameter (a tied head is stored in the embedding). `config_to_hf`: a `config.json` that gives the same
    config back. `hf_model_types`: the `model_type` of every `config.json` that the family reads.
    """

    name: str
    flavors: Mapping[str, Config]
    config_from_hf: Callable[[Mapping[str, Any]], Config]
    build: Callable[[Config], LayeredModel]
    hf_names: Callable[[Config], HFNames]
    config_to_hf: Callable[[Config], dict[str, Any]]
    hf_model_types: tuple[str, ...]

    def config_from_flavor(self, name: str, vocab_size: int | None = None, **overrides: Any) -> Config:
        """A flavor's config, with the tokenizer's vocabulary size and any other field put in its place."""
        if name not in self.flavors:
            raise unknown_name(f"{self.name} flavor", name, self.flavors)
        if vocab_size is not None:
            overrides["vocab_size"] = vocab_size
        try:
            return replace(self.flavors[name], **overrides)
        except TypeError as error:
            raise ModelConfigError(f"{self.name} config: {error}") from None

    def hf_redundant(self, config: Config) -> frozenset[str]:
        """Tensors that some files hold though nothing is stored in them: a tied head, tables of rotations."""
        blocks = (f"model.layers.{index}.self_attn." for index in range(config.num_layers))
        rotations = {f"{block}rotary_emb.inv_freq" for block in blocks}
        return frozenset(rotations | ({"lm_head.weight"} if config.tied_embeddings else set()))
