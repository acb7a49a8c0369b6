"""Small byte-level BPE vocabularies, trained by the package tokenizers on the standard library's source files.

Each family's way to split text has one, with the special and added tokens that its released chat template needs.
"""

import json
import sysconfig
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_OSS = "|".join(
    [
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


@dataclass(frozen=True)
class Family:
    pattern: str | None
    special: tuple[str, ...]
    in_text: tuple[str, ...] = ()
    nfc: bool = False
    ignore_merges: bool = False
    bos: str | None = None
    eos: str = ""
    digits: str | None = None
    """`single` or `runs`: the splitter `Digits` comes before GPT-2's pattern."""

    unknown: str | None = None
    """The special token that stands for bytes without a token."""

    all_bytes: bool = True


FAMILIES = {
    "llama3": Family(
        LLAMA3,
        (
            *("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|start_header_id|>"),
            *("<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        ),
        ignore_merges=True,
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
    ),
    "qwen3": Family(
        QWEN,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_pad|>"),
        ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
        nfc=True,
        eos="<|im_end|>",
    ),
    "gpt_oss": Family(
        GPT_OSS,
        (
            *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>"),
            *("<|end|>", "<|message|>", "<|call|>"),
        ),
        eos="<|return|>",
    ),
    "gpt2": Family(None, ("<|endoftext|>",), eos="<|endoftext|>"),
    # SmolLM2's kind: 13 bytes and more have no token, and digits are apart.
    "smollm2": Family(
        None, ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), eos="<|im_end|>", digits="single", all_bytes=False
    ),
    "runs of digits": Family(
        None, ("<|endoftext|>",), eos="<|endoftext|>", digits="runs", unknown="<|endoftext|>", all_bytes=False
    ),
}


def real_text():
    root = Path(sysconfig.get_path("stdlib"))
    names = ("argparse.py", "typing.py", "json/decoder.py", "datetime.py", "inspect.py")
    others = "Zażółć gęślą jaźń. Съешь же ещё этих булок. 我能吞下玻璃而不伤身体。 नमस्ते 안녕하세요 🙂👩‍🚀\r\n\t x² ½ ſ"
    return [*((root / name).read_text() for name in names), others * 20]


def beginnings():
    """List beginnings of the real texts: all kinds of text, in a sixth of its length."""
    return [text[:15_000] for text in real_text()]


def random_text(generator):
    def any_character():
        code = generator.randrange(0x110000 - 0x800)
        return chr(code if code < 0xD800 else code + 0x800)

    kinds = [
        any_character,
        lambda: chr(generator.randrange(0x20, 0x3000)),
        lambda: generator.choice(" \n\r\t\u00a0\u3000\u2028"),
        lambda: generator.choice(["the", "ing", "DON'T", "'ſ", "123", "::", "e\u0301", "<think>", "</tool_call>"]),
    ]
    return "".join(generator.choice(kinds)() for _ in range(generator.randrange(40)))


@cache
def train(name, vocab_size=3000, text=None):
    family = FAMILIES[name]
    model = models.BPE(ignore_merges=family.ignore_merges, unk_token=family.unknown)
    tokenizer = tokenizers.Tokenizer(model)
    if family.nfc:
        tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=family.pattern is None)
    tokenizer.pre_tokenizer = byte_level
    if family.pattern is not None:
        split = pre_tokenizers.Split(tokenizers.Regex(family.pattern), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif family.digits is not None:
        digits = pre_tokenizers.Digits(individual_digits=family.digits == "single")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet() if family.all_bytes else []
    # A trained vocabulary has the token for unknown bytes from its beginning.
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=alphabet,
        special_tokens=[family.unknown] if family.unknown else [],
        show_progress=False,
    )
    tokenizer.train_from_iterator(real_text() if text is None else text, trainer)
    tokenizer.add_special_tokens(list(family.special))
    tokenizer.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in family.in_text])
    if family.bos is not None:
        bos = family.bos, tokenizer.token_to_id(family.bos)
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{family.bos} $A", special_tokens=[bos])
    return tokenizer


def write(folder, name, tokenizer=None):
    family = FAMILIES[name]
    tokenizer = tokenizer or train(name)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": family.bos, "eos_token": {"content": family.eos}}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return tokenizer
