"""The work of a layer for one micro-batch, counted from shapes: a part of the layer protocol, without torch."""

from collections.abc import Iterable
from dataclasses import dataclass

# The parts of a layer whose results can be kept for its recomputation (`torchround/keeping.py`): query, key and value
# before norm and rotation; the attention kernel; its output projection; gate and up, of an MLP or of experts; the last
# product.
KEEPABLE = ("qkv", "attention", "output", "gate_up", "down")
# Each of several tensors that travel in one buffer begins at a multiple of this.
ALIGNMENT_BYTES = 256


def aligned(nbytes: int) -> int:
    """Round a tensor's bytes up to what it takes in a buffer of several."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(frozen=True)
class KeptWork:
    """A part of a layer whose results can be kept for its recomputation, one of `KEEPABLE`.

    - `nbytes`: what is kept for one micro-batch, each tensor `aligned`.
    - `flops`: matrix products that the recomputation then skips, counted as in `Products`.
    - `activation_bytes`: the part of `LayerWork.activation_bytes` that is the same memory as the kept tensors. A
      recomputation from them does not need it a second time.
    - `kind`: the kind of these products, as in `Products`.
    """

    name: str
    nbytes: int
    flops: float
    activation_bytes: int = 0
    kind: str = "dense"

    @staticmethod
    def of(
        name: str, sizes: Iterable[int], flops: float, activation_bytes: int = 0, kind: str = "dense"
    ) -> "KeptWork":
        return KeptWork(name, sum(map(aligned, sizes)), flops, activation_bytes, kind)


@dataclass(frozen=True)
class Products:
    """Matrix products of one kind in the forward of a layer. A multiply-add is 2 FLOPs.

    - `flops`: products of the forward, once per token that is computed.
    - `frozen_flops`: the part of `flops` spent on products with frozen weights.
    - `kind`: `"dense"`, attention included, `"grouped"` for stacks of experts, or `"head"`. Each has a rate of its own
      (`planning/rates.py`).
    """

    flops: float
    frozen_flops: float = 0.0
    kind: str = "dense"


@dataclass(frozen=True)
class LayerWork:
    """The cost of one layer, or of a part of one, for one micro-batch, counted from shapes.

    - `products`: the matrix products.
    - `activation_bytes`: memory kept between the layer's forward and its backward.
    - `boundary_bytes`: size of the layer's output; 0 for a part whose output stays inside the layer.
    - `workspace_bytes`: scratch that is alive only inside one call, such as a chunk of logits.
    - `keepable`: the parts whose results can be kept, in the order in which they run.
    - `unkept_bytes`: what would be kept too, but is made again in the backward, chunk by chunk.
    - `keeps_whole`: whether the layer keeps all of `keepable` or nothing, as a compiled layer does.
    """

    products: tuple[Products, ...] = ()
    activation_bytes: int = 0
    boundary_bytes: int = 0
    workspace_bytes: int = 0
    keepable: tuple[KeptWork, ...] = ()
    unkept_bytes: int = 0
    keeps_whole: bool = False

    def __add__(self, other: "LayerWork") -> "LayerWork":
        """Combine parts of one layer that run one after the other.

        Kept memory adds up, products and keepable parts are joined. Scratch is free again when the next part runs, and only
        one part's output leaves the layer, so of these two the larger counts.
        """
        return LayerWork(
            self.products + other.products,
            self.activation_bytes + other.activation_bytes,
            max(self.boundary_bytes, other.boundary_bytes),
            max(self.workspace_bytes, other.workspace_bytes),
            self.keepable + other.keepable,
            self.unkept_bytes + other.unkept_bytes,
        )

    @property
    def forward_flops(self) -> float:
        return sum(part.flops for part in self.products)

    @property
    def backward_flops(self) -> float:
        """FLOPs without recomputation: two gradients of a product at a forward each, one for a frozen weight."""
        return sum(2 * part.flops - part.frozen_flops for part in self.products)
