"""`[model.shape]`: the sizes of a model that is no named size of its family."""

from typing import Annotated

from pydantic import Field

from torchround.config.key_types import Table

# Bounds far above any model. They keep a slip of the keyboard from becoming a plan of a week.
Size = Annotated[int, Field(ge=1, le=2**24)]
Positions = Annotated[int, Field(ge=1, le=2**40)]


class ShapeTable(Table):
    """Sizes of a model of one's own, which begins at random. With `model.flavor` they replace the flavor's. Alone they need
    `num_layers`, `hidden_size`, `num_heads` and `ffn_size`; what else is missing is as in the family's models.

    `config.json` of an export holds them under Hugging Face's names. A run cannot be resumed with another shape.
    """

    num_layers: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Blocks."""

    hidden_size: Size | None = None
    """Width of the residual stream. Multiples of 64 are fast."""

    num_heads: Size | None = None
    """Heads of attention, a multiple of `num_kv_heads`."""

    num_kv_heads: Size | None = None
    """Heads of keys and values. Default: the flavor's, otherwise `num_heads`."""

    head_dim: Size | None = None
    """Channels of a head, an even number. Default: the flavor's, otherwise `hidden_size / num_heads`."""

    ffn_size: Size | None = None
    """Width of the feed-forward; in a model with experts, of each expert."""

    vocab_size: Size | None = None
    """Rows of the embedding, at least as many as the tokenizer has tokens; a multiple of 128 is fast. Default: the flavor's, or
    as many as the tokenizer has tokens if these are more, or if there is no flavor."""

    max_positions: Positions | None = None
    """Longest sequence that the model is meant for, in tokens. Nothing is allocated for it. Default: the family's."""

    rope_theta: Annotated[float, Field(gt=1)] | None = None
    """Base of the rotary embedding. The scaling of a flavor stays. Default: the family's."""

    norm_eps: Annotated[float, Field(gt=0)] | None = None
    """Epsilon of the norms. Default: the family's."""

    tied_embeddings: bool | None = None
    """Use of the embedding as the head's projection too, which saves `vocab_size` x `hidden_size` parameters. Default: the
    flavor's, otherwise false."""

    num_experts: Size | None = None
    """Experts in each block, in families that have them. Default: the flavor's, otherwise a dense feed-forward."""

    num_chosen: Size | None = None
    """Experts that serve a token, 1 to `num_experts`."""

    balance_coefficient: Annotated[float, Field(ge=0)] | None = None
    """Factor of the penalty for an unequal load of the experts. 0: no penalty. Default: the flavor's, otherwise 0.001."""

    window: Size | None = None
    """Tokens that a token sees in blocks with a sliding window, itself included, in families that have them. Default: the
    family's."""
