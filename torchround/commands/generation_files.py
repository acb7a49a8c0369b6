"""What a Hugging Face folder needs beside its weights so that `transformers` generates text from it.

`config.json` and `generation_config.json` get the ids of special tokens. A model without them would begin and end its text
by the defaults of its class, which are tokens of another vocabulary. The tokenizer `bytes` has no file, so its export gets
one.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchround.config import Config
from torchround.data import DataError, MissingTokenizerError, Tokenizer, TokenizerError, build_tokenizer
from torchround.data.document_types import Conversation
from torchround.data.loader import reads_conversations
from torchround.data.text.chat import ChatTemplate
from torchround.hf.tensor_folder import read_object
from torchround.untrusted.regular_file import write_whole

logger = logging.getLogger(__name__)

GENERATION_FILE = "generation_config.json"
ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_generation(folder: Path, content: dict[str, Any], config: Config) -> list[str]:
    """Write `generation_config.json`, and the files of the tokenizer `bytes`; put the special tokens into `content`.

    `content` is that of `config.json`, `config` the run's. Returns the names of the files. A tokenizer that is gone is a
    warning: the weights are exported anyway.
    """
    table, base = config.tokenizer, config.model.hf_path
    is_base = table.path is None or (base is not None and Path(table.path) == Path(base))
    keeps_tokens = base is not None and table.name is None and is_base
    ids: dict[str, Any] = {}
    files: dict[str, dict[str, Any]] = {}
    try:
        tokenizer = build_tokenizer(table, base)
    except (TokenizerError, MissingTokenizerError) as error:
        logger.warning("the export has no %s of its own: %s", GENERATION_FILE, error)
    else:
        ids = token_ids(tokenizer, reads_conversations(config.data))
        if not keeps_tokens:
            content.update(ids)  # None too: a class may have another default
        if table.name == "bytes":
            files = byte_tokenizer_files(tokenizer)
    if settings := generation_content(base, ids, keeps_tokens):
        files[GENERATION_FILE] = settings
    for name, written in files.items():
        write_json(folder / name, written)
    return list(files)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_whole(path, json.dumps(content, indent=2) + "\n")


def token_ids(tokenizer: Tokenizer, with_chats: bool) -> dict[str, Any]:
    """Choose the special tokens of a model that was trained with the tokenizer.

    After training on chats text also ends with the token that ends the assistant's turn; then `eos_token_id` is a list.
    """
    ends = list(dict.fromkeys([tokenizer.eos_id, *(turn_ends(tokenizer) if with_chats else [])]))
    ids = {"bos_token_id": tokenizer.bos_id, "eos_token_id": ends if len(ends) > 1 else ends[0]}
    return {**ids, "pad_token_id": tokenizer.pad_id}


def turn_ends(tokenizer: Tokenizer) -> list[int]:
    """Find the token that ends the assistant's turn in the chat template. Without a template there is none."""
    chat = Conversation(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}))
    try:
        spans = ChatTemplate(tokenizer)(chat)
    except (TokenizerError, DataError):
        return []  # no template, or one that no chat of the run was written with
    ends = [span.text for span in spans if span.learn and span.special]
    return [tokenizer.special_id(text) for text in ends[-1:]]


def generation_content(base: str | None, ids: Mapping[str, Any], same_tokens: bool) -> dict[str, Any]:
    """Put the ids of special tokens into the base's settings of generation. Raises `HFError`.

    `same_tokens`: the run kept the base's tokenizer. The base's own ids then stay, and the ends that training has added
    join them. Otherwise they are ids of another vocabulary.
    """
    content = {} if base is None else _read(base, GENERATION_FILE)
    found = {key: value for key, value in ids.items() if value is not None}
    if same_tokens and content:
        ends = _as_list(content.get("eos_token_id"))
        ends += [end for end in _as_list(found.pop("eos_token_id", None)) if end not in ends]
        if ends:
            content["eos_token_id"] = ends if len(ends) > 1 else ends[0]
        return {**found, **content}
    return {**{key: value for key, value in content.items() if key not in ID_KEYS}, **found}


def _as_list(ids: Any) -> list[int]:
    return [] if ids is None else list(ids) if isinstance(ids, Sequence) else [ids]


def stop_tokens(config: Config, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a text: of a document, of a turn in a chat, and what the model's folder names."""
    ends = [tokenizer.eos_id, *turn_ends(tokenizer)]
    table, base = config.tokenizer, config.model.hf_path
    # A tokenizer from elsewhere has other ids. The settings of generation come before the model's.
    if base is not None and table.path in (None, base) and table.name is None:
        settings = [_read(base, name).get("eos_token_id") for name in (GENERATION_FILE, "config.json")]
        named = next((found for found in settings if found is not None), None)
        ends += [end for end in _as_list(named) if type(end) is int]
    return tuple(dict.fromkeys(ends))


def _read(folder: str, name: str) -> dict[str, Any]:
    path = Path(folder).expanduser() / name
    return read_object(path) if path.is_file() else {}


def byte_tokenizer_files(tokenizer: Tokenizer) -> dict[str, dict[str, Any]]:
    """Return the content of `tokenizer.json` and `tokenizer_config.json` that give the tokens of the tokenizer `bytes`."""
    import tokenizers  # here: a run on a bare machine exports nothing
    from tokenizers import decoders, models, pre_tokenizers, processors

    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    # The names of bytes in files of the package tokenizers: printable Latin-1 as itself, the others from U+0100 on.
    names = {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}
    written = tokenizers.Tokenizer(models.BPE({names[byte]: byte for byte in range(256)}, []))
    written.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    written.decoder = decoders.ByteLevel()
    # In the order of their ids, which follow those of the bytes.
    written.add_special_tokens(sorted(tokenizer.special, key=tokenizer.special.__getitem__))
    bos = tokenizer.template_tokens["bos_token"]
    written.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.special[bos])]
    )
    return {
        "tokenizer.json": json.loads(written.to_str()),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.template_tokens},
    }
