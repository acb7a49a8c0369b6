"""Small models of `transformers` whose likeliest tokens are no near ties, ours with their weights, and prompts.

Shapes: V vocabulary.
"""

from functools import cache

import torch
import transformers

from tests.support.model_tools import gather, released_tensors
from tests.support.toy_decoders import toy_decoder
from torchround.engine.device import CpuDevice
from torchround.generation import TextEngine, inference_store
from torchround.models import FAMILIES

VOCAB = 97
STOP = 11
SHAPE = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4}
SHAPE |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
OWN = {
    "llama3": (transformers.LlamaConfig, {}),
    "qwen3": (transformers.Qwen3MoeConfig, EXPERTS),
    # Its window of 12 tokens is shorter than most prompts.
    "gpt_oss": (
        transformers.GptOssConfig,
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 12, "rope_parameters": YARN},
    ),
}


@cache
def their_model(family):
    config_class, settings = OWN[family]
    return toy_decoder(config_class(**SHAPE | settings))


def own_model(family, devices=None):
    theirs, ours = their_model(family), FAMILIES[family]
    config = ours.config_from_hf(theirs.config.to_dict())
    model, names = ours.build(config), ours.hf_names(config)
    store = inference_store(model, torch.float32, devices or [CpuDevice(0)])
    released = released_tensors(theirs)
    store.write_weights({name: gather(names[name], released) for name in store.weights()})
    return model, store


def text_engine(family, num_devices=1, **options):
    devices = [CpuDevice(index) for index in range(num_devices)]
    return TextEngine(*own_model(family, devices), devices, **{"batch_size": 16, "tokens": 128} | options)


def prompts(count, seed=0):
    draws = torch.Generator().manual_seed(seed)
    lengths = torch.tensor([1, 3, 8, 13, 24, 40]).repeat(-(-count // 6))[:count]
    return [torch.randint(0, VOCAB, (int(n),), generator=draws).tolist() for n in lengths]


def their_texts(model, texts, max_tokens, stop=None):
    """Texts of a length run together, so that no padding is needed."""
    found = {}
    for length in {len(text) for text in texts}:
        rows = [row for row, text in enumerate(texts) if len(text) == length]
        tokens = torch.tensor([texts[row] for row in rows])
        with torch.no_grad():
            whole = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=stop,
                pad_token_id=0,
            )
        for row, text in zip(rows, whole[:, length:].tolist(), strict=True):
            found[row] = text[: text.index(stop) + 1] if stop in text else text
    return [found[row] for row in range(len(texts))]
