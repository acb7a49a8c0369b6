"""The sizes that every decoder-only transformer has, and the error for a model that cannot be built."""

from dataclasses import dataclass

from torchround.models.common.rope import Rope

SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size")


class ModelConfigError(ValueError):
    """A model setting that is missing, unsupported or contradicts another; the message holds the values."""


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and settings that the families share, as a `config.json` gives them for all blocks together.

    A family's own config adds only what differs, and the family turns it into the settings of each block
    (`decoder.BlockSettings`).

    `head_dim` need not be `hidden_size / num_heads`. `max_positions` is the longest document that the model's maker
    states; nothing is allocated for it. With `tied_embeddings` the head's projection is the embedding.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    rope: Rope
    max_positions: int
    norm_eps: float = 1e-5
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        for key in SIZES:
            if getattr(self, key) < 1:
                raise ModelConfigError(f"{key} = {getattr(self, key)}, must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelConfigError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ModelConfigError(f"head_dim = {self.head_dim}, must be even: RoPE rotates pairs")

    @property
    def known_positions(self) -> int:
        """Longest document, in tokens, that the model was trained for, or that its scaled RoPE is made for."""
        return self.rope.known_positions(self.max_positions)
