"""Hostile folders of models, adapters, tokenizers and templates: one message each, nothing touched, nothing unpickled."""

import json
import math

import torch
from safetensors.torch import save_file

from tests.support.hostile_cases import BOMB, DEEP, ESCAPED, TITLE, Case, first, forge_header, judge, renamed_to
from torchround.checkpoint.folders import is_checkpoint_name

HF = (
    {"model_type": "llama", "vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": False}
    | {"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "hidden_act": "silu"}
)
PRETRAINED = ("--model.family=llama3", "--model.flavor=none", "--model.hf_path=release", "--engine.plan=none")
ONE_STEP = "--training.steps=1"


def release(folder):
    block, shapes = "model.layers.0.", {"model.embed_tokens": (300, 16), "lm_head": (300, 16), "model.norm": (16,)}
    shapes |= {f"{block}{name}_layernorm": (16,) for name in ("input", "post_attention")}
    shapes |= {f"{block}self_attn.{name}_proj": (8 if name in "kv" else 16, 16) for name in "qkvo"}
    shapes |= {f"{block}mlp.{name}_proj": (32, 16) for name in ("gate", "up")} | {f"{block}mlp.down_proj": (16, 32)}
    (folder / "release").mkdir()
    (folder / "release" / "config.json").write_text(json.dumps(HF))
    weights = {f"{name}.weight": torch.full(shape, 0.1) for name, shape in shapes.items()}
    save_file(weights, folder / "release" / "model.safetensors")
    return folder / "release"


def config(says, **changes):
    return Case(lambda folder: (release(folder) / "config.json").write_text(json.dumps(HF | changes)), says, PRETRAINED)


def file(name, content, says, *without):
    def write(folder):
        path = release(folder)
        for other in without:
            (path / other).unlink()
        (path / name).write_bytes(content)

    return Case(write, says, PRETRAINED)


def header(change, says="damaged", length=None):
    def forge(folder):
        path = release(folder) / "model.safetensors"
        path.write_bytes(forge_header(path.read_bytes(), change, length))

    return Case(forge, says, PRETRAINED)


def index(weight_map, says):
    """Return a release with an index in place of its one file: beside one, it is not read."""
    content = json.dumps({"weight_map": weight_map}).encode()
    return file("model.safetensors.index.json", content, says, "model.safetensors")


def model_s_program(folder):
    named = {"auto_map": {"AutoModel": "evil.Model"}, "trust_remote_code": True, "custom_pipelines": {"x": {}}}
    (release(folder) / "config.json").write_text(json.dumps(HF | named))
    (folder / "release" / "evil.py").write_text("open('pwned', 'w')\n")


MODELS = {
    "weights that are a pickle": file("model.safetensors", BOMB, "model.safetensors: "),
    "a pickle alone": file("pytorch_model.bin", BOMB, "neither model.safetensors .*_model.bin", "model.safetensors"),
    "a header longer than all memory": header(lambda entries: None, "model.safetensors: ", 2**63),
    "a header nested without end": header(lambda entries: DEEP),
    "offsets past the end": header(first(data_offsets=[10**15, 10**15 + 64]), "truncated|damaged"),
    "a type that does not exist": header(first(dtype="O"), "of a type that is not read"),
    "a shape beyond all memory": header(first(shape=[2**40, 2**40])),
    "a tensor that is a terminal's command": header(renamed_to(TITLE), f"not part of the model: {ESCAPED}"),
    "a tensor of a name without end": header(renamed_to("a" * 10**6), r"not part of the model: a(?s:.{0,2500})$"),
    "an index that is a terminal's command": index({"a": f"{TITLE}.safetensors"}, f"files are missing: {ESCAPED}"),
    "an index that climbs": index({"a": "../outside.safetensors"}, "is not the name of a safetensors file"),
    "an index of lists": index({"a": ["b"]}, "index.json"),
    "an index nested without end": file("model.safetensors.index.json", DEEP, "index.json", "model.safetensors"),
    "a config nested without end": file("config.json", DEEP, "config.json cannot be read"),
    "a config that is no object": file("config.json", b"[1]", "does not hold a JSON object"),
    "a width below nothing": config("hidden_size", hidden_size=-16),
    "a width that is no number": config("hidden_size", hidden_size=math.nan),
    "a width beyond all memory": config("hidden_size|memory|missing", hidden_size=2**62),
    "layers without end": config("num_hidden_layers", num_hidden_layers=10**9),
    "a vocabulary without end": config("vocab_size|memory|missing", vocab_size=2**62),
    "heads that do not fit": config("num_key_value_heads|kv", num_key_value_heads=7),
    "a theta that is no number": config("rope_theta|theta", rope_theta=math.nan),
    "a program that the config names": Case(model_s_program, "the run is complete", (*PRETRAINED, ONE_STEP), 0),
}

CHATS = ('--data.sources=[{ path = "chats.jsonl", content = "messages" }]', "--tokenizer.chat_template=template.jinja")
TURNS = "{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content }}<|eos|>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}"


def template(source, says, *arguments, code=2, later=0):
    def write(folder):
        (folder / "secret").write_text("hunter2")
        (folder / "template.jinja").write_text(source)
        turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "{{ 7 * 7 }} Hi"}]
        good = json.dumps({"messages": turns}) + "\n"
        (folder / "chats.jsonl").write_text(good + (good * later + good.replace("Hello", "later") if later else ""))

    return Case(write, says, (*CHATS, *arguments), code)


LATER = TURNS + "{% if 'later' in messages[0].content %}{{ 'a' * 10**10 }}{% endif %}" + PROMPT
TEMPLATES = {
    "a class by its attribute": template("{{ ''.__class__.__mro__ }}", "unsafe"),
    "a function's globals": template("{{ raise_exception.__globals__.x }}", "unsafe|chat template"),
    "a file included": template("{% include 'secret' %}", "(?!.*hunter2)chat template"),
    "a text times a billion": template("{{ 'a' * 10**10 }}", "chat template .*MemoryError"),
    "no template at all": template("{% for", "chat template .*TemplateSyntaxError"),
    "a template that a later record makes hostile": template(
        LATER,
        "line 201: error in chat template .*MemoryError",
        "--data.shuffle=false",
        "--training.steps=99",
        code=1,
        later=199,
    ),
    "a conversation that looks like a template": template(TURNS + PROMPT, "the run is complete", ONE_STEP, code=0),
}


def tokenizer(change, says="tokenizer.json", code=2):
    def write(folder):
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        characters = [*map(chr, printable), *(chr(0x100 + index) for index in range(256 - len(printable)))]
        split = {"type": "Split", "pattern": {"Regex": r"\s+|\S+"}, "behavior": "Isolated", "invert": False}
        level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False, "trim_offsets": True}
        rest = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content = {
            "version": "1.0",
            "model": {"type": "BPE", "vocab": {c: i for i, c in enumerate(characters)}, "merges": []},
            "added_tokens": [{"id": 256, "content": "<|endoftext|>", "special": True, **rest}],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
            "post_processor": None,
        }
        changed = change(content)
        text = changed if isinstance(changed, bytes) else json.dumps(content).encode()
        (folder / "tokenizer.json").write_bytes(text)
        (folder / "text.jsonl").write_text(json.dumps({"text": "a" * 3000 + "!"}) + "\n")

    return Case(write, says, ("--tokenizer.name=none", "--tokenizer.path=tokenizer.json"), code)


def pattern(text, says="tokenizer.json", code=2):
    return tokenizer(lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": text}), says, code)


def token(number, says="tokenizer.json"):
    return tokenizer(lambda content: content["model"]["vocab"].update({"a": number}), says)


TOKENIZERS = {
    "a vocabulary nested without end": tokenizer(lambda content: DEEP),
    "a pattern that takes for ever": pattern(r"(?:a|a|aa)+(?=b)|\s+|\S+", "tokenizer|pattern", 1),
    "a pattern that is none": pattern("(((("),
    "ids below nothing": token(-5),
    "ids beyond all memory": token(2**62, "tokenizer"),
    "ids that are twice there": token(5),
    "a merge of what is not there": tokenizer(lambda content: content["model"].update(merges=["zz yy"])),
    # The package gives it an id of its own.
    "a special token of another's id": tokenizer(
        lambda content: content["added_tokens"][0].update(id=3), "the run is complete", 0
    ),
}

LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 16, "bias": "none"}


def adapter(says, content=b"", config=LORA, name="adapter_model.safetensors"):
    def write(folder):
        release(folder)
        (folder / "adapter").mkdir()
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "adapter" / "adapter_config.json").write_text(text)
        (folder / "adapter" / name).write_bytes(content)

    return Case(write, says, (*PRETRAINED, "--lora.rank=2", "--lora.path=adapter"))


def adapter_config(says, **changes):
    return adapter(f"adapter_config.json: .*{says}", config=LORA | changes)


# Their tensors have the same reader as those of models.
ADAPTERS = {
    "adapters as a pickle": adapter("neither .*safetensors .*adapter_model.bin", BOMB, name="adapter_model.bin"),
    "an adapter's config nested without end": adapter("adapter_config.json cannot be read", config=DEEP.decode()),
    "a rank without end": adapter_config("r is 1000000000000000000", r=10**18),
    "a scale that is infinite": adapter_config("lora_alpha is inf", lora_alpha=math.inf),
    "patterns that rename": adapter_config("rank_pattern is .* instead of {}", rank_pattern={"(a+)+$": 2}),
    "a kind of its own": adapter_config("peft_type is", peft_type=TITLE),
}


def test_hostile_models_tokenizers_templates_and_adapters_are_a_message_and_touch_nothing(processes, tmp_path):
    folders = judge({**MODELS, **TEMPLATES, **TOKENIZERS, **ADAPTERS}, processes, tmp_path)
    later = folders["a template that a later record makes hostile"]
    assert any(map(is_checkpoint_name, (path.name for path in later.rglob("outputs/*/checkpoints/*")))), (
        "a run that such a record ends is saved"
    )
