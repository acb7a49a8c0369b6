"""GPT-OSS, Llama, and a model whose blocks differ, through the engine: the bits of a plain loop.

`tests/support/engine_rows.py` has Qwen3's and Llama's layers in every mode of the engine.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.support.small_decoders import decoder
from torchround.models import ModelConfigError, TransformerConfig
from torchround.models.common import chunks
from torchround.models.common.attention import Attention
from torchround.models.common.decoder import ATTENTION_NAMES, GATED_MLP_NAMES, BlockSettings, assemble, decoder_names
from torchround.models.common.experts import GatedExperts
from torchround.models.common.feed_forward import GatedMLP, MoE, MoEShape
from torchround.models.common.primitives import RMSNorm
from torchround.models.common.rope import Rope
from torchround.models.qwen3 import QK_NORM_NAMES, expert_names
from torchround.planning.partition import Partition
from torchround.planning.update_modes import BOUNDED, SYNC

ADAPTERS = ("q_proj", "v_proj")
CUTS = [[[12, 20], [32]], [[32]], [[7, 25]]]  # documents of micro-batches; the second has one alone


@pytest.mark.parametrize(
    ("name", "adapters", "dtype", "mode", "stale", "backward", "chunk"),
    [
        ("gpt_oss", (), torch.float32, SYNC, 0, (1, 1, 1), 24),
        ("gpt_oss", ADAPTERS, torch.bfloat16, BOUNDED, 3, (2, 1), 24),
        ("gpt_oss", ADAPTERS, torch.bfloat16, BOUNDED, 3, (2, 1), 64),
        ("llama3", (), torch.bfloat16, BOUNDED, 3, (2, 1), 24),
    ],
)
def test_training_of_tied_models_is_bitwise_that_of_a_plain_loop(
    name, adapters, dtype, mode, stale, backward, chunk, train_as_a_loop, monkeypatch
):
    """Each layer below a stale one starts its recomputation from its own input: with experts, adapters, dropout, ties."""
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", chunk)  # micro-batches have up to 64 tokens
    model = decoder(name, "debug", adapters, vocab_size=50, num_layers=2, tied_embeddings=True)
    partition = Partition((1, 2), 1, backward)
    train_as_a_loop(model, partition, CUTS, steps=3, stale=stale, dtype=dtype, mode=mode)


CONFIG = TransformerConfig(4, 32, 4, 2, 8, 48, 50, Rope(10000.0), max_positions=64)
HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
MIXTURE = MoEShape(4, 2, 24, balance_coefficient=0.01)
EXPERT_NAMES = expert_names(4)


class OffsetNorm(RMSNorm):
    def forward(self, x):
        return super().forward(x) + torch.nn.functional.rms_norm(x, x.shape[-1:], eps=self.eps)

    def init_weights(self):
        with torch.no_grad():
            self.weight.zero_()


def block(attention, feed_forward, names, norm=RMSNorm, eps=1e-5):
    return BlockSettings(attention, feed_forward, partial(norm, eps=eps), {**ATTENTION_NAMES, **names})


def sliding(**settings):
    return partial(Attention, **HEADS, rope=Rope(10000.0), window=5, **settings)


def full(**settings):
    return partial(Attention, **HEADS, rope=Rope(1000000.0), **settings)


BLOCKS = [
    block(sliding(), partial(GatedMLP, ffn_size=48), GATED_MLP_NAMES),
    block(full(), partial(MoE, shape=MIXTURE, make_experts=GatedExperts), EXPERT_NAMES, eps=1e-6),
    block(
        sliding(qk_norm_eps=1e-6), partial(GatedMLP, ffn_size=40), {**GATED_MLP_NAMES, **QK_NORM_NAMES}, norm=OffsetNorm
    ),
    block(full(), partial(MoE, shape=MIXTURE, make_experts=GatedExperts), EXPERT_NAMES),
]


@pytest.mark.parametrize(("tied", "devices"), [(False, 1), (True, 2)])
def test_training_of_blocks_that_differ_is_bitwise_that_of_a_plain_loop(tied, devices, train_as_a_loop):
    model = assemble(replace(CONFIG, tied_embeddings=tied), BLOCKS)
    partition = Partition((1, 2, 2), 1, (1, 2, 2))  # embedding; pairs of blocks; head, and back in pairs
    train_as_a_loop(model, partition, CUTS, devices=devices)


def test_each_block_has_its_own_hugging_face_names():
    model, names = assemble(CONFIG, BLOCKS), decoder_names(CONFIG, BLOCKS)
    assert names.keys() == model.stored_shapes().keys()
    assert names["block.0.mlp.gate.weight"] == "model.layers.0.mlp.gate_proj.weight"
    assert names["block.1.mlp.router.weight"] == "model.layers.1.mlp.gate.weight"
    assert names["block.1.mlp.experts.up"] == tuple(
        f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in range(4)
    )
    assert names["block.2.attention.query_norm.weight"] == "model.layers.2.self_attn.q_norm.weight"
    assert "block.0.attention.query_norm.weight" not in names


def test_the_penalty_counts_only_blocks_with_experts(tools):
    model = tools.materialise(assemble(CONFIG, BLOCKS))
    batch = tools.micro_batch([[32], [32]], 50)
    stream, load = tools.hidden_before_head(model, batch)
    # Each token chooses 2 experts in each of the 2 blocks with experts.
    assert load[:, 0].sum(dim=-1).tolist() == [2 * 2 * 32] * 2
    with torch.no_grad():
        plain = model.layers[-1](stream, batch)
    penalty = (model.layers[-1]((stream, load), batch) - plain) / (0.01 * batch.num_labels())
    # Switch Transformer: E * sum of products of shares, 2 for a balanced choice of 2 experts; fresh routers are near.
    assert penalty.item() == pytest.approx(2.0, rel=0.05)


def test_penalties_that_cannot_be_added_up_are_refused_with_their_values():
    other = partial(MoE, shape=replace(MIXTURE, num_experts=8), make_experts=GatedExperts)
    blocks = [BLOCKS[1], replace(BLOCKS[3], feed_forward=other)]
    with pytest.raises(ModelConfigError, match=r"\(4, 0.01\), \(8, 0.01\)"):
        assemble(CONFIG, blocks)
