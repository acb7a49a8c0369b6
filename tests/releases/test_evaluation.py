"""What lm-eval asks of a model, the log-likelihoods of choices: from a checkpoint here and from its export in `transformers`."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import train
from tests.support.batch_contents import write_lines
from tests.support.small_run import working_in
from torchround.checkpoint.folders import checkpoint_name
from torchround.commands import try_model
from torchround.data.scored_windows import ScoredWindow, scored_batch
from torchround.generation import score
from torchround.layer import IGNORED_LABEL
from torchround.run.hardware import find_hardware

CONFIG = """
model = { family = "FAMILY", shape = { num_layers = 2, hidden_size = 32, num_heads = 2, ffn_size = 48 EXPERTS } }
tokenizer = { name = "bytes" }
data = { sources = [{ path = "text.jsonl" }] }
training = { steps = 20, seq_len = 64, global_batch_size = 4, dtype = "float32" }
optimizer = { lr = 1e-2 }
engine = { devices = "cpu", num_devices = 2, cpu_threads = 1, measure_steps = 0 }
checkpoint = { export = "weights" }
"""
QUESTIONS = [
    (f"{n} and {n + 1} is", [*[f" {2 * n}"] * (n % 2), f" {2 * n + 1}", " a lot of things"]) for n in (1, 4, 12, 30, 77)
]
FAMILIES = {"llama3": "", "gpt_oss": ", num_experts = 3, num_chosen = 2"}
EXPORT = Path(f"outputs/run/export/{checkpoint_name(20)}")


@pytest.fixture(params=[pytest.param("llama3", marks=pytest.mark.releases), "gpt_oss"])
def folder(request, tmp_path):
    with working_in(tmp_path) as folder:
        write_lines(folder / "text.jsonl", [{"text": f"{n} and {n + 1} is {2 * n + 1}"} for n in range(99)])
        text = CONFIG.replace("FAMILY", request.param).replace(" EXPERTS", FAMILIES[request.param])
        (folder / "run.toml").write_text(text)
        assert train.main(["--config=run.toml"]) == 0
        yield folder


def pairs(tokenizer):
    """Tokenise as lm-eval does: the whole text, whose first tokens are those of the question."""
    for question, choices in QUESTIONS:
        start = len(tokenizer(question).input_ids)
        for choice in choices:
            yield tokenizer(question + choice).input_ids, start


def from_checkpoint(tokenizer):
    tried = try_model.model_of_run(Path("outputs/run"), None, {})
    found = []
    with try_model.text_engine(tried, find_hardware(tried.options.config.engine), 4, 64) as engine:
        for tokens, start in pairs(tokenizer):
            labels = np.array(tokens[1:])
            labels[: start - 1] = IGNORED_LABEL
            window = ScoredWindow(np.array(tokens[:-1]), labels, ends=True)
            found.append(-score(engine, [[scored_batch([window], tried.tokenizer.pad_id)]]).loss_sum)
    return torch.tensor(found, dtype=torch.float64)


def from_export(tokenizer):
    model, found = AutoModelForCausalLM.from_pretrained(EXPORT).eval(), []
    for tokens, start in pairs(tokenizer):
        ids = torch.tensor(tokens)
        with torch.no_grad():
            scores = model(ids[None, :-1]).logits[0].double().log_softmax(-1)
        found.append(scores.gather(1, ids[1:, None])[start - 1 :].sum())
    return torch.stack(found)


def test_choices_have_the_likelihoods_and_the_winners_that_transformers_gives_the_export(folder):
    tokenizer = AutoTokenizer.from_pretrained(EXPORT)
    ours, theirs = from_checkpoint(tokenizer), from_export(tokenizer)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
    counts = [len(choices) for _, choices in QUESTIONS]
    winners = [[int(scores.argmax()) for scores in found.split(counts)] for found in (ours, theirs)]
    assert winners[0] == winners[1]
    assert len(set(winners[0])) > 1, "a test of one winner would say little"
