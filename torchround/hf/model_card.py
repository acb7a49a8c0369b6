"""The model card of an export: `README.md` with a head in YAML, as model hubs read it.

It names the base, the data and the settings. It holds names of folders but no paths: a card is published.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchround.untrusted.terminal import terminal_safe

CARD_FILE = "README.md"

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/")


@dataclass(frozen=True)
class CardFacts:
    """Facts of a card: the configuration, `step`, labels so far, base folder, and the base's name in its `config.json`."""

    run: Mapping[str, Any]
    step: int
    tokens: int | None
    base: Path | None
    base_name: str | None
    adapters: bool
    original_base: bool = False


def model_card(facts: CardFacts) -> str:
    return "\n".join([*_head(facts), "", *_body(facts)]) + "\n"


def hub_name(base: Path | None, base_name: str | None) -> str | None:
    """Find the base's name on the Hugging Face hub, from its folder in the hub's cache or from its `config.json`."""
    cached = CACHED.search(f"{base}/") if base is not None else None
    if cached is not None:
        return f"{cached[1]}/{cached[2]}"
    return base_name if base_name is not None and HUB_NAME.fullmatch(base_name) else None


def _head(facts: CardFacts) -> Iterator[str]:
    """Yield the lines of the YAML head. A JSON string is a YAML string."""
    base = hub_name(facts.base, facts.base_name)
    yield "---"
    yield f"library_name: {'peft' if facts.adapters else 'transformers'}"
    yield "pipeline_tag: text-generation"
    if base is not None:
        yield f"base_model: {json.dumps(base)}"
        yield f"base_model_relation: {'adapter' if facts.adapters else 'finetune'}"
    datasets = [name for name in map(_dataset, facts.run.get("data", {}).get("sources", ())) if name]
    if datasets:
        yield "datasets:"
        yield from (f"- {json.dumps(name)}" for name in dict.fromkeys(datasets))
    yield "tags: [torchround]"
    yield "---"


def _dataset(source: Mapping[str, Any]) -> str | None:
    path = source["path"]
    is_named = source.get("format") == "dataset" and HUB_NAME.fullmatch(path) is not None
    return path if is_named and not Path(path).exists() else None


def _body(facts: CardFacts) -> Iterator[str]:
    run = facts.run
    model, name = run["model"], run.get("run", {}).get("name", "model")
    yield f"# {name}"
    yield ""
    if facts.base is not None:
        known = hub_name(facts.base, facts.base_name)
        yield f"A {model['family']} model, trained from {_code(known or facts.base.name)} with torchround."
    else:
        yield f"A {model['family']} model ({model['flavor'] or 'a shape of its own'}), trained from scratch with torchround."
    if (packed := (run.get("lora") or {}).get("base", "bf16")) != "bf16" and not facts.adapters:
        into = (
            "the released weights" if facts.original_base else "the rounded weights that they were trained on"
        )
        yield f"The adapters were trained on a base in {_code(packed)} and are merged into {into}."
    yield from ("", "## Data", "")
    for source in run.get("data", {}).get("sources", ()):
        shown = _dataset(source) or Path(source["path"]).name or source["path"]
        yield f"- {_code(shown)}: {source.get('content', 'text')}, weight {source.get('weight', 1.0):g}"
    yield from ("", "## Training", "", "| | |", "|---|---|")
    yield from (f"| {key} | {value} |" for key, value in _settings(facts))


def _settings(facts: CardFacts) -> Iterator[tuple[str, str]]:
    run, training = facts.run, facts.run["training"]
    yield "steps", f"{facts.step:,}"
    if facts.tokens is not None:
        yield "labels trained on", f"{facts.tokens:,}"
    for table, keys in SHOWN.items():
        values = run.get(table) or {}
        if table == "lora" and not values.get("rank"):
            continue
        for key in keys:
            if values.get(key) not in (None, False, {}, "bf16"):
                yield f"{table}.{key}", _code(values[key])
    yield "training.dtype", _code(training["dtype"])


SHOWN: Mapping[str, tuple[str, ...]] = {
    "training": ("seq_len", "global_batch_size", "max_norm"),
    "optimizer": ("lr", "betas", "eps", "weight_decay"),
    "lr_schedule": ("warmup_steps", "decay", "min_lr_factor"),
    "engine": ("update",),
    "lora": (
        "rank",
        "alpha",
        "base",
        "rslora",
        "dora",
        "rank_pattern",
        "alpha_pattern",
        "dropout",
        "targets",
    ),
    "run": ("seed",),
}
"""The settings in the table. Others say where the run was, not what it learnt."""


def _code(value: Any) -> str:
    """Write a value as code that no value can break out of: on one line, and without backticks or pipes."""
    text = value if isinstance(value, str) else json.dumps(value)
    return f"`{re.sub(r'[`|]', '?', ' '.join(str(terminal_safe(text)).split()))}`"
