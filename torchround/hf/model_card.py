"""The model card of an export: `README.md` with a head in YAML, as model hubs read it.

It names the base, the data and the settings. It holds names of folders but no paths: a card is published.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchround.untrusted.terminal import terminal_safe

CARD_FILE = "README.md"
UNPACKED = "bf16"  # of `lora.base`

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/")


def model_card(
    run: Mapping[str, Any],
    step: int,
    tokens: Any,
    base: Path | None,
    base_name: Any,
    adapters: bool,
    original_base: bool = False,
) -> str:
    """Write the card of a run's configuration: after `step`, with `tokens` labels so far, from a base of this name in its config.

    What a checkpoint has for the tokens, and the base's config for the name, may be anything.
    """
    known, sources = hub_name(base, base_name), run.get("data", {}).get("sources", ())
    lines = [
        "---",
        f"library_name: {'peft' if adapters else 'transformers'}",
        "pipeline_tag: text-generation",
    ]
    if known is not None:  # a JSON string is a YAML string
        relation = "adapter" if adapters else "finetune"
        lines += [f"base_model: {json.dumps(known)}", f"base_model_relation: {relation}"]
    if datasets := dict.fromkeys(filter(None, map(_dataset, sources))):
        lines += ["datasets:", *(f"- {json.dumps(name)}" for name in datasets)]
    model, title = run["model"], run.get("run", {}).get("name", "model")
    lines += ["tags: [torchround]", "---", "", f"# {title}", ""]
    made_of = model.get("flavor") or "a shape of its own"
    made = f"A {model['family']} model ({made_of}), trained from scratch with torchround."
    if base is not None:
        made = f"A {model['family']} model, trained from {_code(known or base.name)} with torchround."
    lines.append(made)
    if (packed := (run.get("lora") or {}).get("base", UNPACKED)) != UNPACKED and not adapters:
        into = "the released weights" if original_base else "the rounded weights that they were trained on"
        lines.append(f"The adapters were trained on a base in {_code(packed)} and are merged into {into}.")
    lines += ["", "## Data", ""]
    for source in sources:
        shown = _dataset(source) or Path(source["path"]).name or source["path"]
        lines.append(
            f"- {_code(shown)}: {source.get('content', 'text')}, weight {source.get('weight', 1.0):g}"
        )
    lines += ["", "## Training", "", "| | |", "|---|---|", f"| steps | {step:,} |"]
    lines += [f"| labels trained on | {tokens:,} |"] if type(tokens) is int else []
    for table, keys in SHOWN.items():
        values = run.get(table) or {}
        if table != "lora" or values.get("rank"):
            given = [key for key in keys.split() if values.get(key) not in (None, False, {}, UNPACKED)]
            lines += [f"| {table}.{key} | {_code(values[key])} |" for key in given]
    return "\n".join([*lines, f"| training.dtype | {_code(run['training']['dtype'])} |"]) + "\n"


def hub_name(base: Path | None, base_name: Any) -> str | None:
    """Find the base's name on the Hugging Face hub, from its folder in the hub's cache or from its `config.json`."""
    cached = CACHED.search(f"{base}/") if base is not None else None
    if cached is not None:
        return f"{cached[1]}/{cached[2]}"
    return base_name if isinstance(base_name, str) and HUB_NAME.fullmatch(base_name) else None


def _dataset(source: Mapping[str, Any]) -> str | None:
    path = source["path"]
    is_named = source.get("format") == "dataset" and HUB_NAME.fullmatch(path) is not None
    return path if is_named and not Path(path).exists() else None


SHOWN = {
    "training": "seq_len global_batch_size max_norm",
    "optimizer": "lr betas eps weight_decay",
    "lr_schedule": "warmup_steps decay min_lr_factor",
    "engine": "update",
    "lora": "rank alpha base rslora dora rank_pattern alpha_pattern dropout targets",
    "run": "seed",
}
"""The settings in the table. Others say where the run was, not what it learnt."""


def _code(value: Any) -> str:
    """Write a value as code that no value can break out of: on one line, and without backticks or pipes."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"`{re.sub(r'[`|]', '?', ' '.join(str(terminal_safe(text)).split()))}`"
