"""Toy folders in the layout of a release: its own `config.json` at small sizes, tensors named, cut and quantised as there.

One rule makes a config small, key by key (`shrunk`). What decides the layout stays: kinds of layers and their order, windows,
rotations, norms, activations, biases, tied weights, experts, quantisation. The class that the config names in `architectures`
writes the tensors under the names that its release has, and the matrices that the release holds in 8 or 4 bits are packed
after that. A tokenizer of the same kind is trained on a few texts.
"""

import copy
import fnmatch
import json
import warnings
from functools import cache

import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.support import vocabularies
from tests.support.toy_decoders import SMALL, random_weights

SINGLE = "model.safetensors"
TOKENS = 320  # of the toy tokenizer, special ones not counted
VOCAB = 448
# Keys of the encoders of pictures and sound, and sizes that a layout needs larger than the toy decoders'.
SIZES = {
    key: value
    for key, value in SMALL.items()
    if key not in ("max_position_embeddings", "initializer_range", "vocab_size")
} | {
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "depth": 2,
    "num_heads": 4,
    "out_hidden_size": 32,
    "top_k_experts": 2,
    "global_head_dim": 16,
    "rotary_dim": 4,
    "mamba_d_ssm": 64,
}
# Scales are shared by 128 x 128 numbers, so matrices have several blocks and ragged ones.
BLOCKS = {"hidden_size": 160, "intermediate_size": 192, "moe_intermediate_size": 144, "q_lora_rank": 136}
MOST_LAYERS = 12
FP8, FP8_MOST = torch.float8_e4m3fn, 448.0
# By their four bits: sign, two of exponent, one of mantissa. A scale is a power of two, kept with 127 added.
MOST_E2M1 = 6.0
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, MOST_E2M1)


def shrunk(released):
    """Return a released config at toy size: itself, with sizes, numbers of layers and ids of tokens made small."""
    config = copy.deepcopy(released)
    quantised = config.get("quantization_config") or {}
    _shrink(config, whole_config(released), SIZES | (BLOCKS if quantised.get("quant_method") == "fp8" else {}))
    _renumber(config)
    return config


def whole_config(content):
    """Return all keys of a config, also those that its class derives from others, such as the kinds of layers."""
    known = {key: value for key, value in content.items() if key not in ("auto_map", "quantization_config")}
    return CONFIG_MAPPING[content["model_type"]].from_dict(known).to_dict()


def _shrink(config, whole, sizes):
    given = {**config, **whole}  # a class may take a key and not keep it
    layers = given.get("num_hidden_layers")
    lists = {
        key: value for key, value in given.items() if isinstance(value, list | str) and layers and len(value) == layers
    }
    heads, pairs = whole.get("num_attention_heads"), whole.get("num_key_value_heads")
    for key, value in given.items():
        if isinstance(value, dict) and key.endswith("_config"):
            is_flat = key == "text_config" and key not in config and "hidden_size" in config  # as of older releases
            _shrink(config if is_flat else config.setdefault(key, {}), value, sizes)
        elif key in sizes and type(value) is int and value > sizes[key]:
            config[key] = sizes[key]
    if layers:
        config["num_hidden_layers"] = count = num_layers(layers, list(lists.values()), whole)
        config |= {key: value[:count] for key, value in lists.items() if key in config}
        if shared := whole.get("num_kv_shared_layers"):
            config["num_kv_shared_layers"] = min(shared, count // 2)
    for key in ("rope_scaling", "rope_parameters"):  # channels by direction in a picture, which fill a head's pairs
        if (table := config.get(key) or {}).get("mrope_section") and not table.get("mrope_interleaved"):
            config[key] = {**table, "mrope_section": [1, 1, SIZES["head_dim"] // 2 - 2]}
    parts = ("qk_nope_head_dim", "qk_rope_head_dim")
    if whole.get("head_dim") == sum(whole.get(part, 0) for part in parts):
        config["head_dim"] = sum(config[part] for part in parts)
    if "vocab_size" in whole:
        config["vocab_size"] = VOCAB
    if heads is not None and heads == pairs:
        config["num_key_value_heads"] = config.get("num_attention_heads", heads)


def num_layers(layers, lists, whole):
    """Return the fewest first layers that have every kind of layer, by the lists that a config gives or derives."""
    kinds = [*zip(*lists, strict=True)] if lists else [()] * layers
    count = next(n for n in range(1, layers + 1) if set(kinds[:n]) == set(kinds))
    if whole.get("num_kv_shared_layers"):  # each kind among those that share, and among those that are shared
        count *= 2
    return min(max(count, 2), layers, MOST_LAYERS)


def _renumber(config):
    """Give the ids of special tokens, which are too large for the toy vocabulary, ids behind those of its tokenizer."""
    found = set()

    def visit(table, change):
        for key, value in table.items():
            if isinstance(value, dict):
                visit(value, change)
            elif key.endswith(("token_id", "token_index")) and value is not None:
                table[key] = [change(one) for one in value] if isinstance(value, list) else change(value)

    def seen(number):
        if number >= VOCAB:
            found.add(number)
        return number

    visit(config, seen)
    new = {number: VOCAB - 1 - place for place, number in enumerate(sorted(found, reverse=True))}
    visit(config, lambda number: new.get(number, number))


def write_release(folder, released, tokenizer):
    """Write a toy release. Returns the model of `transformers` with the very numbers that its files stand for, in fp32."""
    config = shrunk(released)
    folder.mkdir(parents=True)
    write_tokenizer(folder, tokenizer)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    toy_model(config).save_pretrained(folder)
    tensors = {
        name: tensor if name.endswith("correction_bias") else tensor.bfloat16()
        for name, tensor in load_file(folder / SINGLE).items()
    }
    plain = pack(tensors, config.get("quantization_config") or {})
    save_file(tensors, folder / SINGLE, {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=1))  # as it was, with its quantisation
    if not plain:
        return load_model(folder)
    twin = folder.with_name(f"{folder.name} in 16 bits")
    twin.mkdir()
    save_file(plain, twin / SINGLE, {"format": "pt"})
    plain_config = {key: value for key, value in config.items() if key != "quantization_config"}
    (twin / "config.json").write_text(json.dumps(plain_config))
    return load_model(twin)


def model_class(config):
    return getattr(transformers, config["architectures"][0])


def toy_model(config):
    plain = {key: value for key, value in config.items() if key not in ("auto_map", "quantization_config")}
    kind = model_class(config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing kernels, of which PyTorch's own code takes the place
        model = kind(kind.config_class.from_dict(plain)).eval()
    # A released model's hidden states grow little by little from those of its tokens. Of small embeddings the first branches
    # make something else, and rounding grows: of weights 1e-7 apart, the logits of Gemma 4 were 1e-5 apart in float64.
    random_weights(model, 0.1 * (SMALL["hidden_size"] / model.config.get_text_config().hidden_size) ** 0.5)
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            module.weight.data.div_(module.weight.data.std())
    return model


def load_model(folder):
    """Load a folder with the class that its config names. Raises `AssertionError` if a tensor is missing or left over."""
    config = json.loads((folder / "config.json").read_text())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, report = model_class(config).from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    wrong = {key: value for key, value in report.items() if value and key != "error_msgs"}
    assert not wrong, f"transformers loads the folder with {wrong}"
    return model.eval()


def pack(tensors, quantised):
    """Quantise the matrices that a release quantises, in place. Returns all tensors with the numbers they stand for."""
    method = quantised.get("quant_method")
    if method == "fp8":
        return _pack_fp8(tensors, quantised)
    if method == "mxfp4":
        return _pack_mxfp4(tensors)
    assert method is None, f"a layout that is not written here: {method}"
    return {}


def _pack_fp8(tensors, quantised):
    """Write `weight` in E4M3 beside `weight_scale_inv`, one for each block, or one for all (and one for activations)."""
    plain, left = {}, quantised.get("modules_to_not_convert") or ["lm_head"]
    for name in list(tensors):
        plain[name] = weight = tensors[name]
        module = name.removesuffix(".weight")
        is_router = module.endswith((".gate", ".router"))
        if weight.ndim != 2 or "embed" in name or "norm" in name or is_router or _is_left(module, left):
            continue
        rows, columns = quantised.get("weight_block_size") or weight.shape
        blocks = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
        padded = torch.zeros(blocks[0] * rows, blocks[1] * columns)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        tiles = padded.unflatten(1, (blocks[1], columns)).unflatten(0, (blocks[0], rows))
        scales = tiles.abs().amax((1, 3)) / FP8_MOST
        wide = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[: weight.shape[0], : weight.shape[1]]
        codes = (weight.float() / wide).to(FP8)
        tensors[name] = codes
        if quantised.get("weight_block_size"):
            tensors[f"{name}_scale_inv"] = scales
        else:
            tensors[f"{name}_scale_inv"] = scales[0, 0].bfloat16()
            wide = wide.bfloat16().float()
            if quantised.get("activation_scheme") == "static":
                tensors[f"{module}.activation_scale"] = torch.tensor(1.0, dtype=torch.bfloat16)
        plain[name] = (codes.float() * wide).bfloat16()
    return plain


def _is_left(module, patterns):
    return any(
        module == pattern or module.startswith(f"{pattern}.") or f".{pattern}." in f".{module}."
        or fnmatch.fnmatch(module, pattern)
        for pattern in patterns
    )  # fmt: skip


def _pack_mxfp4(tensors):
    """Write GPT-OSS's stacks of experts as `_blocks` of two 4-bit numbers a byte, and `_scales`, one for 32 numbers."""
    plain, values = {}, torch.tensor([*E2M1, *(-value for value in E2M1)])
    for name in list(tensors):
        plain[name] = weight = tensors[name]
        if not name.endswith(("gate_up_proj", "down_proj")):
            continue
        groups = weight.float().transpose(1, 2).unflatten(2, (-1, 32))  # [E, Z, G, 32]
        powers = torch.ceil(torch.log2(groups.abs().amax(-1) / MOST_E2M1))
        scaled = groups / torch.exp2(powers)[..., None]
        codes = (scaled[..., None] - values).abs().argmin(-1).to(torch.uint8)
        del tensors[name]
        tensors[f"{name}_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
        tensors[f"{name}_scales"] = (powers + 127).to(torch.uint8)
        numbers = values[codes.int()] * torch.exp2(powers)[..., None]
        plain[name] = numbers.flatten(2).transpose(1, 2).bfloat16().contiguous()
    return plain


def write_tokenizer(folder, kind):
    trained, names = toy_tokenizer(kind)
    trained.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@cache
def toy_tokenizer(kind):
    """Train a small tokenizer of a kind. Returns it with the names of its first and its last token of a text."""
    if kind != "gemma":
        family = vocabularies.FAMILIES[kind]
        return vocabularies.train(kind, TOKENS), {"bos_token": family.bos, "eos_token": family.eos}
    # SentencePiece's BPE: spaces are a letter, and what has no token is written byte by byte.
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    first = special + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=TOKENS + 100, special_tokens=first, limit_alphabet=64, show_progress=False)
    tokenizer.train_from_iterator(["".join(vocabularies.real_text())[:20000]], trainer)
    content = json.loads(tokenizer.to_str())
    # The names of bytes are ordinary tokens in releases. A trainer knows them as special ones only.
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] in special]
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    first = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    tokenizer.post_processor = first
    return tokenizer, {"bos_token": "<bos>", "eos_token": "<eos>"}
