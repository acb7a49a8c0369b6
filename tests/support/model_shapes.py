"""Models as numbers: parameters, FLOPs, activation bytes and operational intensity, by the paper's formulas.

For roofline questions, without building a model. A run's own costs come from its layers' `work`.
Source of the formulas: RoundPipe appendix B.1, B.2 and C; of the shapes: each model's released config.json.

Letters: B sequences, T tokens, D model width, H heads, K kv heads, E experts.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """A model's sizes, with 16-bit weights and activations. With experts, `ffn_size` is one expert's."""

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    num_experts: int = 1
    active_experts: int = 1

    def attention_parameters(self):
        """Count the parameters of the four projections."""
        return 2 * self.width * self.head_dim * (self.num_heads + self.num_kv_heads)

    def block_parameters(self):
        """Count the parameters of the projections and all experts: a stage uploads these for one block."""
        router = self.width * self.num_experts if self.num_experts > 1 else 0
        return self.attention_parameters() + 3 * self.width * self.ffn_size * self.num_experts + router

    def block_forward_flops(self, batch, tokens):
        """Count FLOPs by equation 2: matrix products only, all T x T pairs of the attention."""
        linear = self.attention_parameters() + 3 * self.width * self.ffn_size * self.active_experts
        attention = 4 * tokens * self.num_heads * self.head_dim
        return float(batch * tokens * (2 * linear + attention))

    def block_activation_bytes(self, batch, tokens):
        """Count bytes by equation 1, with heads that need not add up to the width."""
        heads = 4 * self.num_heads * self.head_dim + 4 * self.num_kv_heads * self.head_dim
        per_token = 8 * self.width + heads + 6 * self.ffn_size * self.active_experts
        return batch * tokens * per_token

    def boundary_bytes(self, batch, tokens):
        """Return the size of one activation between two blocks."""
        return 2 * batch * tokens * self.width

    def operational_intensity(self, batch, tokens):
        """Return the FLOPs of a block's forward per byte uploaded for it (equations 4 and 5)."""
        uploaded = 2 * self.block_parameters() + self.boundary_bytes(batch, tokens)
        return self.block_forward_flops(batch, tokens) / uploaded


def model_shape(family, flavor):
    """Return the shape of a released model, or None."""
    numbers = _SHAPES.get(f"{family}/{flavor}")
    return None if numbers is None else ModelShape(*numbers)


def shape_names():
    """Return `family/flavor` of all shapes."""
    return tuple(_SHAPES)


# layers, width, heads, kv heads, head dim, ffn, vocabulary, experts, active experts
_SHAPES = {
    "qwen3/0.6B": (28, 1024, 16, 8, 128, 3072, 151936),
    "qwen3/1.7B": (28, 2048, 16, 8, 128, 6144, 151936),
    "qwen3/4B": (36, 2560, 32, 8, 128, 9728, 151936),
    "qwen3/8B": (36, 4096, 32, 8, 128, 12288, 151936),
    "qwen3/14B": (40, 5120, 40, 8, 128, 17408, 151936),
    "qwen3/32B": (64, 5120, 64, 8, 128, 25600, 151936),
    "qwen3/30B-A3B": (48, 2048, 32, 4, 128, 768, 151936, 128, 8),
    "qwen3/235B-A22B": (94, 4096, 64, 4, 128, 1536, 151936, 128, 8),
    "llama3/3.1-8B": (32, 4096, 32, 8, 128, 14336, 128256),
    "llama3/3.1-70B": (80, 8192, 64, 8, 128, 28672, 128256),
    "llama3/3.1-405B": (126, 16384, 128, 8, 128, 53248, 128256),
    "llama3/3.2-1B": (16, 2048, 32, 8, 64, 8192, 128256),
    "llama3/3.2-3B": (28, 3072, 24, 8, 128, 8192, 128256),
    "gpt_oss/20B": (24, 2880, 64, 8, 64, 2880, 201088, 32, 4),
    "gpt_oss/120B": (36, 2880, 64, 8, 64, 2880, 201088, 128, 4),
}
