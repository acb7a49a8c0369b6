"""Hostile folders of models, adapters, tokenizers and templates: one message each, nothing touched."""

import json
import os
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.fork_server import ForkServer
from tests.support.hostile_cases import Case, judge
from tests.support.scenarios import prepare

HF = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}
PRETRAINED = ("--model.family=llama3", "--model.flavor=none", "--model.hf_path=release", "--engine.plan=none")
ADAPTED = (*PRETRAINED, "--lora.rank=2", "--lora.path=adapter")
CHATS = ('--data.sources=[{ path = "chats.jsonl", content = "messages" }]', "--tokenizer.chat_template=template.jinja")
BLOCK = "model.layers.0."


class Bomb:
    """A pickle that runs a program when it is loaded."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch pwned",)


def weights() -> dict[str, torch.Tensor]:
    shapes = {
        "model.embed_tokens.weight": (300, 16),
        "lm_head.weight": (300, 16),
        "model.norm.weight": (16,),
        **{f"{BLOCK}{name}_layernorm.weight": (16,) for name in ("input", "post_attention")},
        **{f"{BLOCK}self_attn.{name}_proj.weight": (16, 16) for name in "qo"},
        **{f"{BLOCK}self_attn.{name}_proj.weight": (8, 16) for name in "kv"},
        **{f"{BLOCK}mlp.{name}_proj.weight": (32, 16) for name in ("gate", "up")},
        f"{BLOCK}mlp.down_proj.weight": (16, 32),
    }
    return {name: torch.full(shape, 0.1) for name, shape in shapes.items()}


def release(folder: Path) -> Path:
    """Write a small, sound model."""
    (folder / "release").mkdir()
    (folder / "release" / "config.json").write_text(json.dumps(HF))
    save_file(weights(), folder / "release" / "model.safetensors")
    return folder / "release"


def with_config(**changes: Any):
    def prepare_config(folder: Path) -> None:
        (release(folder) / "config.json").write_text(json.dumps(HF | changes))

    return prepare_config


def with_file(name: str, content: bytes, *without: str):
    """Write a file into the release, and remove others."""

    def prepare_file(folder: Path) -> None:
        path = release(folder)
        for other in without:
            (path / other).unlink()
        (path / name).write_bytes(content)

    return prepare_file


def with_header(change: Callable[[dict[str, Any]], Any], length: int | None = None):
    """Put another header in front of the weights, sound or not."""

    def prepare_header(folder: Path) -> None:
        path = release(folder) / "model.safetensors"
        whole = path.read_bytes()
        (old_length,) = struct.unpack("<Q", whole[:8])
        header = json.loads(whole[8 : 8 + old_length])
        changed = change(header)
        text = changed if isinstance(changed, bytes) else json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + whole[8 + old_length :])

    return prepare_header


def entry(header: dict[str, Any], **changes: Any) -> None:
    header["model.norm.weight"].update(changes)


def index(weight_map: Any):
    def prepare_index(folder: Path) -> None:
        (folder / "outside.safetensors").write_bytes(b"precious")
        path = release(folder)
        (path / "model.safetensors").unlink()  # an index beside it is not read
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return prepare_index


def adapter(config: Any, name: str = "adapter_model.safetensors", content: bytes = b""):
    def prepare_adapter(folder: Path) -> None:
        release(folder)
        (folder / "adapter").mkdir()
        text = config if isinstance(config, str) else json.dumps(config)
        (folder / "adapter" / "adapter_config.json").write_text(text)
        (folder / "adapter" / name).write_bytes(content)

    return prepare_adapter


def template(source: str):
    def prepare_template(folder: Path) -> None:
        (folder / "secret").write_text("hunter2")
        (folder / "template.jinja").write_text(source)
        turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "{{ 7 * 7 }} Hi"}]
        (folder / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")

    return prepare_template


def tokenizer(change: Callable[[dict[str, Any]], Any]):
    """Return the harm of a changed byte-level BPE without merges."""

    def prepare_tokenizer(folder: Path) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in printable]
        characters = [*map(chr, printable), *(chr(0x100 + index) for index in range(len(others)))]
        split = {"type": "Split", "pattern": {"Regex": r"\s+|\S+"}, "behavior": "Isolated", "invert": False}
        level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
        content = {
            "model": {"type": "BPE", "vocab": {c: i for i, c in enumerate(characters)}, "merges": []},
            "added_tokens": [{"id": 256, "content": "<|endoftext|>", "special": True}],
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
            "post_processor": None,
        }
        changed = change(content)
        text = changed if isinstance(changed, bytes) else json.dumps(content).encode()
        (folder / "tokenizer.json").write_bytes(text)
        (folder / "text.jsonl").write_text(json.dumps({"text": "a" * 3000 + "!"}) + "\n")

    return prepare_tokenizer


OWN_TOKENIZER = ("--tokenizer.name=none", "--tokenizer.path=tokenizer.json")
DEEP = b'{"a":' * 100_000
BOMB = pickle.dumps(Bomb())
ZIPPED_BOMB = b"PK\x03\x04" + BOMB

MODELS = {
    "a pickle called safetensors": Case(
        with_file("model.safetensors", BOMB), "model.safetensors: .*no safetensors", PRETRAINED
    ),
    "a zipped pickle called safetensors": Case(
        with_file("model.safetensors", ZIPPED_BOMB), "no safetensors|damaged|truncated", PRETRAINED
    ),
    "weights as a pickle": Case(
        with_file("pytorch_model.bin", BOMB, "model.safetensors"),
        "neither model.safetensors .*pytorch_model.bin",
        PRETRAINED,
    ),
    "a header longer than all memory": Case(with_header(lambda h: None, 2**63), "model.safetensors: ", PRETRAINED),
    "a header of nothing": Case(with_header(lambda h: None, 0), "model.safetensors: ", PRETRAINED),
    "a header nested without end": Case(with_header(lambda h: DEEP), "its header is damaged", PRETRAINED),
    "a header that is a list": Case(with_header(lambda h: b"[]      "), "its header is damaged", PRETRAINED),
    "an offset before the start": Case(with_header(lambda h: entry(h, data_offsets=[-64, 0])), "damaged", PRETRAINED),
    "an offset past the end": Case(
        with_header(lambda h: entry(h, data_offsets=[10**15, 10**15 + 64])), "truncated|damaged", PRETRAINED
    ),
    "offsets that run backwards": Case(with_header(lambda h: entry(h, data_offsets=[64, 0])), "damaged", PRETRAINED),
    "offsets that overlap": Case(with_header(lambda h: entry(h, data_offsets=[32, 96])), "damaged", PRETRAINED),
    "offsets that are fractions": Case(
        with_header(lambda h: entry(h, data_offsets=[0.0, 64.0])), "damaged", PRETRAINED
    ),
    "offsets that are words": Case(with_header(lambda h: entry(h, data_offsets=["0", "64"])), "damaged", PRETRAINED),
    "a type that lies": Case(with_header(lambda h: entry(h, dtype="F64")), "damaged", PRETRAINED),
    "a type that does not exist": Case(
        with_header(lambda h: entry(h, dtype="O")), "of a type that is not read", PRETRAINED
    ),
    "a shape beyond all memory": Case(with_header(lambda h: entry(h, shape=[2**40, 2**40])), "damaged", PRETRAINED),
    "a shape below nothing": Case(with_header(lambda h: entry(h, shape=[-16])), "damaged", PRETRAINED),
    "a shape of fractions": Case(with_header(lambda h: entry(h, shape=[16.5])), "damaged", PRETRAINED),
    "a tensor that is a terminal's command": Case(
        with_header(lambda h: h.update({"\x1b]0;pwned\x07": h.pop("model.norm.weight")})),
        r"not part of the model: \\x1b\]0;pwned\\x07",
        PRETRAINED,
    ),
    "a tensor of a name without end": Case(
        with_header(lambda h: h.update({"a" * 10**6: h.pop("model.norm.weight")})),
        r"not part of the model: a(?s:.{0,2500})$",
        PRETRAINED,
    ),
    "a file in the index that is a terminal's command": Case(
        index({"a": "\x1b]0;pwned\x07.safetensors"}), r"files are missing: \\x1b\]0;pwned\\x07", PRETRAINED
    ),
    "an index that climbs": Case(
        index({"a": "../outside.safetensors"}), "is not the name of a safetensors file", PRETRAINED
    ),
    "an index with an absolute name": Case(
        index({"a": "/etc/passwd"}), "is not the name of a safetensors file", PRETRAINED
    ),
    "an index of lists": Case(index({"a": ["b"]}), "index.json", PRETRAINED),
    "an index nested without end": Case(
        with_file("model.safetensors.index.json", DEEP, "model.safetensors"), "index.json cannot be read", PRETRAINED
    ),
    "a config nested without end": Case(with_file("config.json", DEEP), "config.json cannot be read", PRETRAINED),
    "a config that is no object": Case(with_file("config.json", b"[1]"), "does not hold a JSON object", PRETRAINED),
    "a width below nothing": Case(with_config(hidden_size=-16), "hidden_size", PRETRAINED),
    "a width of nothing": Case(with_config(hidden_size=0), "hidden_size", PRETRAINED),
    "a width that is no number": Case(with_config(hidden_size=float("nan")), "hidden_size", PRETRAINED),
    "a width in words": Case(with_config(hidden_size="16"), "hidden_size", PRETRAINED),
    "a width beyond all memory": Case(with_config(hidden_size=2**62), "hidden_size|memory|missing", PRETRAINED),
    "layers without end": Case(with_config(num_hidden_layers=10**9), "num_hidden_layers", PRETRAINED),
    "a vocabulary without end": Case(with_config(vocab_size=2**62), "vocab_size|memory|missing", PRETRAINED),
    "heads that do not fit": Case(with_config(num_key_value_heads=7), "num_key_value_heads|kv", PRETRAINED),
    "no heads": Case(with_config(num_attention_heads=0), "num_attention_heads", PRETRAINED),
    "a theta that is no number": Case(with_config(rope_theta=float("nan")), "rope_theta|theta", PRETRAINED),
    "an infinite epsilon": Case(with_config(rms_norm_eps=float("inf")), "rms_norm_eps|eps", PRETRAINED),
}
TEMPLATES = {
    "a class by its attribute": Case(template("{{ ''.__class__.__mro__ }}"), "unsafe", CHATS),
    "a function's globals": Case(template("{{ raise_exception.__globals__.x }}"), "unsafe|chat template", CHATS),
    "a format's attribute": Case(template("{{ '{0.__class__}'.format(messages) }}"), "unsafe|chat template", CHATS),
    "a file included": Case(template("{% include 'secret' %}"), "(?!.*hunter2)chat template", CHATS),
    "a file imported": Case(template("{% import 'secret' as s %}"), "(?!.*hunter2)chat template", CHATS),
    "a parent": Case(template("{% extends '/etc/passwd' %}"), "chat template", CHATS),
    "loops without end": Case(
        template("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
        "chat template .*more than 4 s of the processor",
        CHATS,
    ),
    "a text times a billion": Case(template("{{ 'a' * 10**10 }}"), "chat template .*450 MiB of memory", CHATS),
    "no template at all": Case(template("{% for"), "chat template .*TemplateSyntaxError", CHATS),
}
TOKENIZERS = {
    "nested without end": Case(tokenizer(lambda content: DEEP), "tokenizer.json", OWN_TOKENIZER),
    "a pickle": Case(tokenizer(lambda content: BOMB), "tokenizer.json", OWN_TOKENIZER),
    "a pattern that takes for ever": Case(
        tokenizer(
            lambda content: content["pre_tokenizer"]["pretokenizers"][0].update(
                pattern={"Regex": r"(?:a|a|aa)+(?=b)|\s+|\S+"}
            )
        ),
        "tokenizer|pattern",
        OWN_TOKENIZER,
        code=1,
    ),
    "a pattern that is none": Case(
        tokenizer(lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": "(((("})),
        "tokenizer.json",
        OWN_TOKENIZER,
    ),
    "a pattern of nothing": Case(
        tokenizer(lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": ""})),
        r"^(?!(?s:.*)panicked).*tokenizer.json: .*empty",
        OWN_TOKENIZER,
    ),
    "a pattern of nothing before some letters": Case(
        tokenizer(lambda c: c["pre_tokenizer"]["pretokenizers"][0].update(pattern={"Regex": r"(?=aaa)|\s+|\S"})),
        "pattern cannot split",
        OWN_TOKENIZER,
        code=1,
    ),
    "ids below nothing": Case(
        tokenizer(lambda content: content["model"]["vocab"].update({"a": -5})), "tokenizer.json", OWN_TOKENIZER
    ),
    "ids beyond all memory": Case(
        tokenizer(lambda content: content["model"]["vocab"].update({"a": 2**62})), "tokenizer", OWN_TOKENIZER
    ),
    "ids that are twice there": Case(
        tokenizer(lambda content: content["model"]["vocab"].update({"a": 5})), "tokenizer.json", OWN_TOKENIZER
    ),
    "ids in words": Case(
        tokenizer(lambda content: content["model"]["vocab"].update({"a": "x"})), "tokenizer.json", OWN_TOKENIZER
    ),
    "a merge of what is not there": Case(
        tokenizer(lambda content: content["model"].update(merges=["zz yy"])), "tokenizer.json", OWN_TOKENIZER
    ),
    "a special token of another's id": Case(
        tokenizer(lambda content: content["added_tokens"][0].update(id=3)), "tokenizer.json", OWN_TOKENIZER
    ),
}
CASES = {
    f"{kind}: {name}": case
    for kind, cases in (("model", MODELS), ("template", TEMPLATES), ("tokenizer", TOKENIZERS))
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_model_adapter_tokenizer_or_template_is_a_message_and_touches_nothing(
    fork_server: ForkServer, tmp_path: Path, name: str
) -> None:
    prepare(tmp_path)
    judge(CASES[name], fork_server, tmp_path)


def test_a_template_that_a_later_record_makes_hostile_ends_the_run_with_a_checkpoint(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    prepare(tmp_path)
    turns = "{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content }}<|eos|>{% endfor %}"
    bomb = "{% if 'later' in messages[0].content %}{{ 'a' * 10**10 }}{% endif %}"
    template(turns + bomb + "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}")(tmp_path)
    good = (tmp_path / "chats.jsonl").read_text()
    (tmp_path / "chats.jsonl").write_text(good * 200 + good.replace("Hello", "later") + good * 200)
    overrides = [*CHATS, "--data.shuffle=false", "--data.epochs=1", "--training.steps=400"]
    child = fork_server.run("meets_harm", overrides, folder=tmp_path)
    text = child.text()
    assert child.wait() == 1 and "Traceback" not in text, text
    assert re.search("line 201: error in chat template .*450 MiB of memory", text), text
    assert list((tmp_path / "outputs").rglob("checkpoints/step-*")), text


def test_code_that_a_model_names_is_not_run(fork_server: ForkServer, tmp_path: Path) -> None:
    prepare(tmp_path)
    named = {"auto_map": {"AutoModel": "evil.Model"}, "trust_remote_code": True, "custom_pipelines": {"x": {}}}
    with_config(**named)(tmp_path)
    (tmp_path / "release" / "evil.py").write_text("open('pwned', 'w')\n")
    child = fork_server.run("meets_harm", [*PRETRAINED, "--training.steps=1"], folder=tmp_path)
    assert child.wait() == 0 and "TOUCHED" not in child.text(), child.text()
    assert not (tmp_path / "pwned").exists()


def test_what_a_conversation_says_is_text_and_no_template(fork_server: ForkServer, tmp_path: Path) -> None:
    """The assistant's turn holds `{{ 7 * 7 }}`."""
    prepare(tmp_path)
    turns = "{% for m in messages %}<|bos|>{{ m.role }}\n{{ m.content }}<|eos|>{% endfor %}"
    template(turns + "{% if add_generation_prompt %}<|bos|>assistant\n{% endif %}")(tmp_path)
    child = fork_server.run("meets_harm", [*CHATS, "--training.steps=1"], folder=tmp_path)
    assert child.wait() == 0 and "TOUCHED" not in child.text(), child.text()
