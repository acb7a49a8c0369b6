"""Decoders of small sizes, with experts or with adapters and dropout."""

import torch

from tests.support.toy import VOCABULARY
from torchround.models import FAMILIES
from torchround.models.common.feed_forward import MoEShape
from torchround.models.common.lora import LoraShape, add_adapters, pack_base
from torchround.packed_formats import FORMATS

SIZES = {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "ffn_size": 48}
EXPERTS = {"moe": MoEShape(3, 2, 24, balance_coefficient=0.001)}


def small_decoder(family, flavor, adapters=(), dropout=0.25, settings=(), **changes):
    """Build a flavor with small sizes and the toy vocabulary. With `adapters` on these matrices, nothing else is trained."""
    sizes = SIZES | (EXPERTS if flavor == "debug_moe" else {})
    fields = {"vocab_size": VOCABULARY, **sizes, **changes}
    return decoder(family, flavor, adapters, (2, 4.0, dropout), settings, **fields)


def decoder(family, flavor, adapters=(), lora=(4, 8.0, 0.25), settings=(), **fields):
    config = FAMILIES[family].config_from_flavor(flavor, **fields)
    model = FAMILIES[family].build(config)
    if adapters:
        add_adapters(model, FAMILIES[family].hf_names(config), LoraShape(*lora, adapters, **dict(settings)))
    return model


def packed_decoder(name, family=("llama3", "debug"), adapters=("q_proj", "up_proj"), **changes):
    """Build a decoder with adapters whose frozen matrices are packed, so their rows are whole groups."""
    sizes = {"num_layers": 3, "hidden_size": 128, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "ffn_size": 256}
    return pack_base(small_decoder(*family, adapters, **sizes | changes), FORMATS[name])


def write_base(store):
    """Write frozen weights that do not depend on the store's seed: a checkpoint does not hold packed ones."""
    for bundle in store.bundles:
        if bundle.packed is not None:
            numbers = torch.randn(bundle.unpacked_numel, generator=torch.Generator().manual_seed(bundle.index)) / 12
            store.write_weights({p.name: numbers[p.start : p.stop].view(p.shape) for p in bundle.parameters})
