"""The command `try_model`: perplexity and continuations, of runs and of folders, against `transformers`."""

import json
import math

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from torchround.commands.generation_files import byte_tokenizer_files
from torchround.commands.try_model import main
from torchround.config import TokenizerTable
from torchround.data import build_tokenizer

SHAPE = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}
RELEASES = {
    "llama3": (LlamaForCausalLM, LlamaConfig, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"tie_word_embeddings": True}),
    "gpt_oss": (GptOssForCausalLM, GptOssConfig, EXPERTS),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),  # no family of our own reads it
}
BYTES = build_tokenizer(TokenizerTable(name="bytes"))
TEXTS = ["a line of text, and more of it\n" * 7, "short", "", "of 35 letters, or so: exactly thirty"]
ON_TWO_DEVICES = ("--engine.devices=cpu", "--engine.num_devices=2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write a random model of each family with the tokenizer `bytes`, in float32."""
    root = tmp_path_factory.mktemp("released")
    for name, (model_class, config_class, settings) in RELEASES.items():
        torch.manual_seed(1)
        ids = {"bos_token_id": BYTES.bos_id, "eos_token_id": BYTES.eos_id, "pad_token_id": BYTES.pad_id}
        model_class(config_class(**SHAPE | settings | ids)).save_pretrained(root / name)
        for file, content in byte_tokenizer_files(BYTES).items():
            (root / name / file).write_text(json.dumps(content))
    return {name: root / name for name in RELEASES}


@pytest.fixture(autouse=True)
def texts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_texts(tmp_path)


def write_texts(folder):
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))


def results(capsys, *arguments):
    """Run the command with `--json`, and read what it prints."""
    assert main([*arguments, "--json", *ON_TWO_DEVICES]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def their_loss(folder, seq_len):
    """Return the mean loss of all texts in windows that do not overlap, by `transformers`, and its tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    losses = []
    for text in filter(None, TEXTS):
        ids = torch.tensor([BYTES.bos_id, *BYTES.encode(text), BYTES.eos_id])
        for start in range(0, len(ids) - 1, seq_len):
            window = ids[start : start + seq_len + 1]
            with torch.no_grad():
                logits = model(window[None, :-1]).logits[0]
            losses.append(torch.nn.functional.cross_entropy(logits, window[1:], reduction="none"))
    every = torch.cat(losses).double()
    return float(every.mean()), len(every)


KINDS = ["llama3", "qwen3", "gpt_oss", pytest.param("qwen2", marks=pytest.mark.nightly)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_perplexity_of_a_file_is_that_of_transformers(kind, folders, capsys):
    (found,) = results(
        capsys, "--model", str(folders[kind]), "--perplexity", "texts.jsonl", "--seq-len=37", "--batch-size=3"
    )
    expected, num_tokens = their_loss(folders[kind], 37)
    assert found["tokens"] == num_tokens and found["documents"] == 3
    # Both add up thousands of products in fp32, in another order.
    assert found["nats_per_token"] == pytest.approx(expected, abs=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(found["nats_per_token"]))


PROMPTS = ["a line of", "short", "one that is longer than the others are", "x"]


def their_texts(folder, prompts, max_tokens):
    """Return greedy continuations by `transformers`, of each prompt alone, without the token that ends them."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    texts = []
    for prompt in prompts:
        ids = torch.tensor([[BYTES.bos_id, *BYTES.encode(prompt)]])
        with torch.no_grad():
            found = model.generate(ids, max_new_tokens=max_tokens, do_sample=False)[0, ids.shape[1] :].tolist()
        texts.append(BYTES.decode_known([token for token in found if token != BYTES.eos_id]))
    return texts


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_continuations_are_those_of_transformers(kind, folders, capsys):
    found = results(capsys, "--model", str(folders[kind]), "--prompt", *PROMPTS, "--max-tokens=12", "--batch-size=3")
    assert [line["prompt"] for line in found] == PROMPTS
    assert [line["text"] for line in found] == their_texts(folders[kind], PROMPTS, 12)
    assert all(line["tokens"] == 12 or line["ended"] for line in found)


def test_drawn_continuations_follow_the_seed_and_not_the_devices_or_the_other_prompts(folders, capsys):
    drawn = ("--model", str(folders["llama3"]), "--temperature=1.5", "--top-k=50", "--top-p=0.9", "--max-tokens=9")
    first = results(capsys, *drawn, "--prompt", *PROMPTS)
    assert first == results(capsys, *drawn, "--prompt", *PROMPTS, "--engine.num_devices=3")
    assert first[:2] == results(capsys, *drawn, "--prompt", *PROMPTS[:2], "--batch-size=1")
    assert first != results(capsys, *drawn, "--prompt", *PROMPTS, "--seed=1")


def test_equal_prompts_are_drawn_apart(folders, capsys):
    drawn = ("--model", str(folders["llama3"]), "--temperature=1.5", "--max-tokens=9")
    one, other = results(capsys, *drawn, "--prompt", "twice", "twice")
    assert one["text"] != other["text"]
