"""Keeping activations never shortens the longest sequence that fits: the planner keeps only what there is room for."""

from dataclasses import replace

import pytest

from scripts.check_tree import ROOT
from tests.support.published_models import by_night
from torchround.commands.plan_run import configured_question, hardware, parser
from torchround.config import parse_command_line
from torchround.pipeline.plan_report import longest_tokens, plan_for


@pytest.mark.parametrize(
    "config", by_night(["qwen3_1_7b", "llama3_1_8b", "gpt_oss_20b", "qwen3_32b", "qwen3_235b_lora"])
)
def test_the_longest_sequence_of_each_published_model_is_as_long_as_without_keeping(config):
    path = str(ROOT / "configs" / f"{config}.toml")
    options = parse_command_line(["--config", path, "--engine.compile", "false"])
    machine = ["--device", "rtx4090", "--num-devices", "8", "--host-memory-gib", "745"]
    card = hardware(parser().parse_args(["--config", path, *machine]), options.config)
    question = configured_question(options, None, card)
    assert question.keep_rule().is_open
    tokens = longest_tokens(replace(question, keep_activations="none"))
    assert longest_tokens(question) == tokens > 0
    plan = plan_for(replace(question, seq_len=tokens, micro_batch_size=1, global_batch_size=8))
    assert card.device_bytes is not None and plan.device_bytes <= card.device_bytes
