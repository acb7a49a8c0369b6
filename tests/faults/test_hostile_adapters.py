"""Hostile adapters: headers that lie about the tensors, and weights that are not numbers. Nothing is unpickled."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tests.faults.test_hostile_models import ADAPTED, BOMB, DEEP, adapter
from tests.support.fork_server import ForkServer
from tests.support.hostile_cases import Case, judge
from tests.support.scenarios import prepare

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 16, "bias": "none"}
NAME = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
ENTRY = {"dtype": "F32", "shape": [2, 16], "data_offsets": [0, 128]}


def with_header(entries: Any, says: str = "damaged") -> Case:
    """Write a file of one tensor with a forged header."""
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return Case(adapter(CONFIG, content=struct.pack("<Q", len(text)) + text + bytes(128)), says, ADAPTED)


def with_tensors(says: str, **tensors: torch.Tensor) -> Case:
    content = save({name.replace("__", "."): tensor for name, tensor in tensors.items()})
    return Case(adapter(CONFIG, content=content), says, ADAPTED)


def with_config(says: str, **changes: Any) -> Case:
    return Case(adapter(CONFIG | changes), f"adapter_config.json: .*{says}", ADAPTED)


CASES = {
    "adapters as a pickle": Case(
        adapter(CONFIG, "adapter_model.bin", BOMB), "neither adapter_model.safetensors .*adapter_model.bin", ADAPTED
    ),
    "a pickle called adapters": Case(adapter(CONFIG, content=BOMB), "adapter_model.safetensors: ", ADAPTED),
    "an adapter's config nested without end": Case(
        adapter(DEEP.decode()), "adapter_config.json cannot be read", ADAPTED
    ),
    "an adapter's config that is a list": Case(adapter([]), "adapter_config.json", ADAPTED),
    "an adapter of a rank without end": Case(adapter(CONFIG | {"r": 10**18}), "r is 1000000000000000000", ADAPTED),
    "offsets that overlap": with_header({NAME: ENTRY, "other": ENTRY}),
    "offsets past the end": with_header({NAME: ENTRY | {"data_offsets": [2**40, 2**40 + 128]}}, says="truncated"),
    "a shape that is not its bytes": with_header({NAME: ENTRY | {"shape": [2**31, 2**31]}}),
    "a type that is not its bytes": with_header({NAME: ENTRY | {"dtype": "F64"}}),
    "an entry that is a list": with_header({NAME: [1]}),
    "a name that is there twice": with_header(
        (json.dumps({NAME: ENTRY})[:-1] + f', "{NAME}": {json.dumps(ENTRY)}}}').encode()
    ),
    "a name that climbs": with_tensors("missing|not part", **{"../../../etc/passwd": torch.zeros(2, 16)}),
    "another shape": with_tensors(r"\[3, 16\]|missing", **{NAME: torch.zeros(3, 16)}),
    "a rank that is no number": with_config("r is nan", r=math.nan),
    "a rank that is true": with_config("r is True", r=True),
    "a scale that is infinite": with_config("lora_alpha is inf", lora_alpha=math.inf),
    "patterns that rename": with_config("rank_pattern is not supported", rank_pattern={"(a+)+$": 2}),
    "a kind of its own": with_config("peft_type is", peft_type="\u001b]0;pwned\u0007"),
}


@pytest.mark.parametrize("name", CASES)
def test_hostile_adapters_are_a_message_and_touch_nothing(fork_server: ForkServer, tmp_path: Path, name: str) -> None:
    prepare(tmp_path)
    judge(CASES[name], fork_server, tmp_path)
