"""What plans of the five published models keep for their backward stages, and what that gains."""

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.frame import GIB, ROOT, Benchmark, Report

CONFIGS = ("qwen3_1_7b", "llama3_1_8b", "gpt_oss_20b", "qwen3_32b", "qwen3_235b_lora")
CARDS = ("rtx4090", "h100")
DEVICES = 8
# Sequences of a step are of the paper's batch; longer ones are fewer, so that a step has as many tokens.
PUBLISHED_TOKENS = 2048
MOST_GAIN_AT_LEAST = 1.15


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the machine and the lengths."""
    parser.add_argument("--configs", nargs="+", default=list(CONFIGS), choices=CONFIGS)
    parser.add_argument("--cards", nargs="+", default=list(CARDS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[2048, 16384], help="sequence lengths")
    parser.add_argument("--host-memory-gib", type=float, default=745.0, help="745 GiB are the paper's 800 GB")


def measure(options: argparse.Namespace) -> Report:
    """Plan each model with and without kept activations, in the mode and the rounds of its config."""
    return {
        "plans": [
            compared(config, card, tokens, options.host_memory_gib, options.overrides)
            for config in options.configs
            for card in options.cards
            for tokens in options.tokens
        ]
    }


def compared(
    config: str, card: str, tokens: int, host_gib: float, overrides: Sequence[str] = ()
) -> dict[str, Any]:
    """Plan one model on one machine twice."""
    from torchround.commands.plan_run import configured_question, hardware, known_vocab_size, parser
    from torchround.config import parse_command_line
    from torchround.pipeline.plan_report import host_memory, plan_for

    path = str(ROOT / "configs" / f"{config}.toml")
    batch = parse_command_line(["--config", path]).config.training.global_batch_size
    sequences = max(DEVICES, batch * PUBLISHED_TOKENS // tokens)
    keys = {
        "training.seq_len": tokens,
        "training.global_batch_size": sequences,
        "training.micro_batch_size": max(1, 4 * PUBLISHED_TOKENS // tokens),
        # Compiled layers keep all or nothing; these tables are of single parts.
        "engine.compile": "false",
    }
    given = [text for key, value in keys.items() for text in (f"--{key}", f"{value}")]
    options = parse_command_line(["--config", path, *given, *overrides])
    machine = ["--device", card, "--num-devices", f"{DEVICES}", "--host-memory-gib", f"{host_gib}"]
    named = parser().parse_args(["--config", path, *machine])
    question = configured_question(options, known_vocab_size(options), hardware(named, options.config))
    bare = replace(question, keep_activations="none")
    without, plan = plan_for(bare), plan_for(question)
    return {
        "config": config,
        "card": card,
        "tokens": tokens,
        "kept": dict(Counter(name for names in plan.kept for name in names)),
        "step_s_without": without.step_s,
        "step_s": plan.step_s,
        "gain": without.step_s / plan.step_s,
        "rounds": plan.rounds,
        "host_gib_without": host_memory(bare, without).total_bytes / GIB,
        "host_gib": host_memory(question, plan).total_bytes / GIB,
    }


def table_of(figures: Report) -> str:
    """Format the plans as a table in Markdown, as docs/planning.md shows it."""
    lines = [
        "| model | card | tokens | kept, by layers | step, s | gain | host, GiB |",
        "| --- | --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for row in figures["plans"]:
        kept = ", ".join(f"`{name}` {number}" for name, number in row["kept"].items()) or "nothing"
        lines.append(
            f"| `{row['config']}` | {row['card']} | {row['tokens']} | {kept} "
            f"| {row['step_s_without']:.2f} to {row['step_s']:.2f} | {row['gain']:.2f} "
            f"| {row['host_gib_without']:.0f} to {row['host_gib']:.0f} |"
        )
    return "\n".join(lines)


def headline(figures: Report) -> tuple[str, str]:
    """Name the plan that gains most."""
    best = max(figures["plans"], key=lambda row: row["gain"])
    return (
        f"steps up to {best['gain']:.2f} times as fast ({best['config']}, {best['card']}, {best['tokens']} tokens)",
        "the same plans with full recomputation",
    )


def missed_bounds(figures: Report) -> list[str]:
    """Say if no plan gains enough, or one is slower."""
    gains = [row["gain"] for row in figures["plans"]]
    missed = [] if max(gains) >= MOST_GAIN_AT_LEAST else [f"the best gains {max(gains):.2f} times"]
    return missed + [f"a plan is {gain:.3f} times as fast" for gain in gains if gain < 1]


KEPT_PLANS = Benchmark(
    """What plans of the five published models keep for their backward stages, and what that gains.

Simulated from counted FLOPs and bytes, on 8 cards, with the paper's host memory and its tokens per step. Any key of
the config can follow, such as --engine.update async or --engine.rounds auto.""",
    add_options,
    measure,
    headline,
    "--configs llama3_1_8b --cards rtx4090 --tokens 16384",
    missed_bounds,
    show=table_of,
    takes_overrides=True,
)
