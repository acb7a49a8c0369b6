"""Plans of models that fit their machine only with a packed base (docs/packed_weights.md), by their real sizes."""

from dataclasses import dataclass

import pytest
from transformers import DeepseekV3Config

from torchround.commands.plan_run import configured_question, planned_hardware
from torchround.config import parse_command_line
from torchround.planning.memory import GIB
from torchround.planning.plan_report import report_plan

pytestmark = pytest.mark.nightly
MLA = '["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]'
RELEASE = ("--model.family=auto", "--model.flavor=none", "--model.hf_path=release", f"--lora.targets={MLA}")
ONE_CARD = ("--machines.num_cards=1", "--machines.host_memory_gib=512")
SMALL_STEPS = ("--machines.card=rtx4090", "--training.micro_batch_size=2")


@dataclass(frozen=True)
class Planned:
    """A config with the bounds of its plan. `base` is in GiB: NF4 takes 4.5 bits a number, MXFP4 4.25, bf16 16."""

    config: str
    overrides: tuple[str, ...]
    base: tuple[float, float]
    host_gib: float
    tokens_per_s: tuple[float, float]


ROWS = {
    "235B in nf4 on eight cards": Planned("qwen3_235b_lora_nf4", (), (123, 127), 190, (2000, 3500)),
    "120B in mxfp4 on one card": Planned("gpt_oss_120b_lora", (), (58, 61), 91.2, (1000, 2000)),
    "671B in nf4 on one card": Planned(  # in 16 bits a block takes 21 GiB
        *("qwen3_235b_lora_nf4", (*RELEASE, *ONE_CARD, *SMALL_STEPS), (350, 358), 486.4, (100, 300))
    ),
}


@pytest.fixture
def question_of(monkeypatch, request, tmp_path):
    configs = request.config.rootpath / "configs"
    DeepseekV3Config(architectures=["DeepseekV3ForCausalLM"]).save_pretrained(tmp_path / "release")
    monkeypatch.chdir(tmp_path)

    def question_of(config, *overrides):
        options = parse_command_line(["--config", str(configs / f"{config}.toml"), *overrides])
        return configured_question(options, planned_hardware(options))

    return question_of


@pytest.mark.parametrize("name", ROWS)
def test_a_packed_base_fits_where_one_in_16_bits_does_not(name, question_of):
    row = ROWS[name]
    question = question_of(row.config, *row.overrides)
    answer = report_plan(question)
    assert answer.plan is not None, answer.problem
    assert row.base[0] < answer.host.weight_bytes / GIB < row.base[1]
    assert answer.host.total_bytes <= question.host_bytes == int(row.host_gib * GIB)
    assert row.tokens_per_s[0] < answer.tokens_per_s < row.tokens_per_s[1]
    plain = question_of(row.config, *row.overrides, "--lora.base=bf16", "--lora.base_cache=none")
    assert plain.state().state_bytes > plain.host_bytes
