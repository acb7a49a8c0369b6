"""Turns a byte-level BPE `tokenizer.json` of the package tokenizers into a tiktoken encoding.

Both packages merge the pair of lowest rank first, so the tokens are the same if ids rise in the order of the merges.
They do in every released byte-level BPE; other files are refused. So is every setting that would change the tokens
and is not known here.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiktoken

from torchround.data.errors import TokenizerError
from torchround.data.text.missing_bytes import NEWER_NUMERALS, MissingBytes
from torchround.untrusted.data_limits import check_token_ids

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PRINTABLE = range(0x20, 0x7F)
SAMPLE = (
    "".join(map(chr, range(1, 0x0250))) + " a1 \u0301\u0915\u4e2d\u3042\uac00\u200d\ufffd\U0001f600\n\n x\t"
)


@dataclass(frozen=True)
class ByteLevelBPE:
    """An encoding, its special tokens, its tokens recognised in any text, and whether text is normalised to NFC.

    `missing` is None if every byte has a token.
    """

    encoding: tiktoken.Encoding
    special: dict[str, int]
    in_text: dict[str, int]
    nfc: bool
    adds_bos: bool
    missing: MissingBytes | None = None


def read_tokenizer_json(path: Path) -> ByteLevelBPE:
    """Read a `tokenizer.json`. Raises `TokenizerError` if it is damaged or not a supported byte-level BPE."""
    try:
        data = path.read_bytes()
        content = json.loads(data)
        return _convert(content, f"byte-level BPE {hashlib.sha256(data).hexdigest()[:12]}")
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error.strerror}") from error
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    except KeyError as error:
        raise TokenizerError(f"{path}: not a tokenizer.json (it lacks {error})") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise TokenizerError(f"{path}: not a tokenizer.json ({error})") from error


def _convert(content: dict[str, Any], name: str) -> ByteLevelBPE:
    model = content["model"]
    _check_model(model)
    added = _added_tokens(content.get("added_tokens") or [])
    ranks = _ranks(model, {token["content"] for token in added})
    ids = {token["content"]: token["id"] for token in added}
    try:
        check_token_ids([*ranks.values(), *ids.values()])
    except ValueError as error:
        raise TokenizerError(error) from error
    pattern = _pattern(content.get("pre_tokenizer"))
    _check_pattern(pattern)
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=ids)
    special = {token["content"]: token["id"] for token in added if token["special"]}
    in_text = {text: number for text, number in ids.items() if text not in special}
    nfc = _is_nfc(content.get("normalizer"))
    for token in added:
        if token["content"] in in_text and nfc and token.get("normalized"):
            raise TokenizerError(f"added token {token['content']!r} is looked for in normalised text")
    adds_bos = _adds_bos(content.get("post_processor"), special)
    return ByteLevelBPE(encoding, special, in_text, nfc, adds_bos, _missing_bytes(model, ranks, pattern))


def _check_pattern(pattern: str) -> None:
    """Refuse a pattern that leaves out characters, or that matches the empty text, at which tiktoken panics."""
    # With a token for it, an empty match shows and does not panic.
    ranks = {b"": 256} | {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding("pattern", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    found = encoding.encode_ordinary(SAMPLE)
    if 256 in found or encoding.decode(found) != SAMPLE:
        raise TokenizerError("its pre_tokenizer's pattern leaves out characters, or matches the empty text")


def _missing_bytes(model: dict[str, Any], ranks: dict[bytes, int], pattern: str) -> MissingBytes | None:
    values = bytes(byte for byte in range(256) if bytes([byte]) not in ranks)
    if not values:
        return None
    unknown = model.get("unk_token") or None
    if unknown is not None and unknown not in model["vocab"]:
        raise TokenizerError(f"its model's unk_token {unknown!r} is not in the vocabulary")
    return MissingBytes(values, pattern, unknown and model["vocab"][unknown], bool(model.get("fuse_unk")))


def _check_model(model: dict[str, Any]) -> None:
    if model.get("type", "BPE") != "BPE" or "merges" not in model:
        raise TokenizerError(f"its model is {model.get('type')!r}; supported: a byte-level BPE")
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(key):
            raise TokenizerError(f"its model has {key} {model[key]!r}, which is not supported")


def _added_tokens(added: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for token in added:
        for key in ("lstrip", "rstrip", "single_word"):
            if token.get(key) and not token["special"]:
                raise TokenizerError(f"added token {token['content']!r} has {key}, which is not supported")
    return added


def _ranks(model: dict[str, Any], added: set[str]) -> dict[bytes, int]:
    """Return the id of each token that bytes and merges make; with `ignore_merges`, of every token."""
    vocab = {token: number for token, number in model["vocab"].items() if token not in added}
    characters = _byte_of_character()
    # Bytes that the vocabulary's text did not hold may have no token, but any text holds some printable ASCII.
    if missing := [
        chr(byte) for character, byte in characters.items() if character not in vocab and byte in PRINTABLE
    ]:
        raise TokenizerError(f"it has no token for {', '.join(map(repr, missing))}: it is not byte-level")
    ranks = {bytes([byte]): vocab[character] for character, byte in characters.items() if character in vocab}
    newest = -1
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        number = vocab[left + right]
        if number < newest:
            raise TokenizerError(
                f"merge {left!r} {right!r} gives id {number} after id {newest}; ids have to rise"
            )
        newest = number
        ranks[bytes(map(characters.__getitem__, left + right))] = number
    # With ignore_merges the package takes a whole word that is a token without merging; tiktoken does so only for tokens
    # that have a rank, so every token must come from a merge.
    unmerged = len(vocab) - len(ranks)
    if unmerged and model.get("ignore_merges"):
        raise TokenizerError(f"{unmerged} tokens come from no merge, but ignore_merges is set")
    return ranks


def _byte_of_character() -> dict[str, int]:
    """Map characters to bytes: printable Latin-1 to itself, the characters from U+0100 on to the other bytes in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


def _pattern(pre_tokenizer: dict[str, Any] | None) -> str:
    """Return the pattern that splits text before merging: from the one `Split`, or GPT-2's if there is only `ByteLevel`."""
    if pre_tokenizer is None:
        raise TokenizerError("it has no pre_tokenizer: it is not byte-level")
    steps = pre_tokenizer["pretokenizers"] if pre_tokenizer["type"] == "Sequence" else [pre_tokenizer]
    *splits, last = steps
    if last["type"] != "ByteLevel" or last.get("add_prefix_space"):
        raise TokenizerError(
            f"its pre_tokenizer does not end in ByteLevel without a prefix space, but in {last}"
        )
    if not splits and last.get("use_regex", True):
        return GPT2_PATTERN
    if [split["type"] for split in splits] == ["Digits"] and last.get("use_regex", True):
        return _gpt2_between_digits(bool(splits[0].get("individual_digits")))
    if len(splits) != 1 or last.get("use_regex", True) or splits[0]["type"] != "Split":
        raise TokenizerError(
            f"its pre_tokenizer has steps {[step['type'] for step in steps]}; supported: one Split, "
            "or none or Digits before ByteLevel's own pattern"
        )
    split = splits[0]
    if (split["behavior"], bool(split["invert"])) not in (("Isolated", False), ("Removed", True)):
        raise TokenizerError(
            f"its Split is {split['behavior']}, invert {split['invert']}; supported: Isolated"
        )
    pattern: str = split["pattern"]["Regex"]
    return pattern


def _gpt2_between_digits(individual: bool) -> str:
    """Return GPT-2's pattern for text that `Digits` has split: at each digit, or at each run of digits.

    The parts between digits are split apart from each other. A digit takes no space before it, and spaces before a
    digit are at the end of their part.
    """
    times = "" if individual else "+"
    numerals = rf"\p{{N}}{times}|[{NEWER_NUMERALS}]{times}"
    kept = rf"\s\p{{N}}{NEWER_NUMERALS}"
    return rf"'(?:[sdmt]|ll|ve|re)| ?\p{{L}}+|{numerals}| ?[^{kept}\p{{L}}]+|\s+(?![^{kept}])|\s+"


def _is_nfc(normalizer: dict[str, Any] | None) -> bool:
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    kinds = [step["type"] for step in steps]
    if kinds not in ([], ["NFC"]):
        raise TokenizerError(f"its normalizer has steps {kinds}; supported: none, or NFC")
    return bool(kinds)


def _adds_bos(post_processor: dict[str, Any] | None, special: dict[str, int]) -> bool:
    """Say whether the tokenizer itself puts a special token before a text."""
    steps = [] if post_processor is None else post_processor.get("processors", [post_processor])
    for step in steps:
        if step["type"] == "TemplateProcessing" and step["single"]:
            first = step["single"][0].get("SpecialToken")
            return first is not None and first["id"] in special
    return False
