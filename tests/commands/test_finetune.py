"""`torchround finetune`: a release and data in, a trained model out, in folders and from a hub; and the mistakes."""

import argparse
import json
import re
import shutil
import socket

import datasets
import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.support.hub_server import hub_of
from tests.support.small_run import before_step, interrupt, tensors_in
from tests.support.space_vocabularies import space_tokenizer, write_kind
from torchround.commands import finetune, try_model
from torchround.commands.configured_model import with_family
from torchround.config import load_config
from torchround.config.load import RawConfig, with_overrides

CHATS = [
    {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"{n} and " * 9}]}
    for n in range(100)
]


def write_release(folder, **changes):
    torch.manual_seed(0)
    write_kind(folder, "phi3")
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    vocab = space_tokenizer("phi3").get_vocab_size()
    LlamaForCausalLM(LlamaConfig(vocab_size=vocab, **shape)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def write_lines(path, records):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def folder(working_folder):
    write_release(working_folder / "release")
    write_lines(working_folder / "chats" / "a.jsonl", CHATS)
    return working_folder


def use_hub(patch, address, cache):
    """Use a hub and a cache that are as if HF_ENDPOINT and HF_HOME had named them."""
    template = address + "/{repo_id}/resolve/{revision}/{filename}"
    names = {"ENDPOINT": address, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_CACHE": str(cache)}
    for name, value in names.items():
        patch.setattr(constants, name, value)
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache / "datasets")


COMMAND = ("release", "chats", "--lora", "4", "--steps", "4", "--engine.cpu_threads", "1")


@pytest.mark.thorough
def test_an_interrupted_run_continues_with_the_same_command_and_ends_in_a_model_to_sample(folder, capsys, monkeypatch):
    before_step(monkeypatch, 2, interrupt)
    assert finetune.main([*COMMAND, "--out", "mine"]) == 143
    assert "continue  torchround finetune release chats --lora 4" in capsys.readouterr().out
    # What the command wrote is the run, and can be read.
    text, resolved = (folder / "mine" / "finetune.toml").read_text(), load_config("mine/config.toml")
    assert text.startswith("# torchround finetune release chats") and "chats/**/*.jsonl" in text
    assert load_config("mine/finetune.toml", ["--model.family=llama3"]) == resolved
    assert resolved.data.sources[0].content == "messages" and resolved.data.validation_fraction > 0
    assert resolved.lora.rank == 4 and resolved.training.steps == 4 and resolved.engine.cpu_threads == 1

    assert finetune.main([*COMMAND, "--out", "mine"]) == 0
    said = capsys.readouterr().out
    assert finetune.main([*COMMAND, "--out", "whole"]) == 0
    mine, whole, adapters = (
        next((folder / name).iterdir()) for name in ("mine/export", "whole/export", "mine/adapters")
    )
    assert tensors_in(mine).keys() == tensors_in(whole).keys()
    assert all(torch.equal(tensor, tensors_in(whole)[name]) for name, tensor in tensors_in(mine).items())
    assert (adapters / "adapter_model.safetensors").is_file()
    assert AutoModelForCausalLM.from_pretrained(mine).config.vocab_size == space_tokenizer("phi3").get_vocab_size()

    (sample,) = re.findall(r"torchround try_model (.*) --prompt", said)
    assert try_model.main([*sample.split(), "--prompt", "What is 3?", "--max-tokens", "4"]) == 0
    assert "What is 3?»" in capsys.readouterr().out
    assert "torchround train --config mine/finetune.toml --training.steps N" in said
    # A complete run says so, and trains nothing.
    before = (folder / "mine" / "metrics.jsonl").read_text()
    assert finetune.main([*COMMAND, "--out", "mine"]) == 0
    assert (folder / "mine" / "metrics.jsonl").read_text() == before


@pytest.mark.thorough
def test_a_model_and_a_dataset_of_the_hub_are_fetched_once_and_then_read_without_a_network(folder, monkeypatch):
    write_lines(folder / "set" / "train.jsonl", CHATS)
    named = {"models/toy/llama": folder / "release", "datasets/toy/chats": folder / "set"}
    command = ["toy/llama", "toy/chats", "--steps", "1", "--checkpoint.export", "off"]
    with hub_of(named) as (address, requests):
        use_hub(monkeypatch, address, folder / "cache")
        assert finetune.main(command) == 0
        fetched = [path for path in requests if path.startswith("GET") and path.endswith("model.safetensors")]
        seen = len(requests)
        assert len(fetched) == 1
        for settings in (constants, datasets.config):
            monkeypatch.setattr(settings, "HF_HUB_OFFLINE", True)
        assert finetune.main([*command, "--out", "b"]) == 0
        assert len(requests) == seen
    used = load_config("outputs/llama-chats/config.toml")
    assert "models--toy--llama/snapshots/" in used.model.hf_path and used.data.sources[0].format == "dataset"


def test_without_steps_the_data_decides_how_long_a_run_is(folder):
    """At first the default of training.steps, 1000, was taken for the user's."""

    def chosen(steps=None, **overrides):
        given = argparse.Namespace(model="release", data="chats", lora=None, steps=steps, split="train", subset=None)
        return {each.key: each.value for each in finetune.choose(given, folder / "x", overrides)}

    free = chosen()
    assert free["data.epochs"] == 3 and "training.steps" not in free and free["training.global_batch_size"] == 1
    assert free["optimizer.lr"] == 1e-5 and free["data.validation_fraction"] == 0.05
    for fixed in (chosen(steps=60), chosen(**{"training.steps": 60})):
        assert fixed["training.steps"] == 60 and "data.epochs" not in fixed and fixed["lr_schedule.warmup_steps"] == 3


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "llama3"),
        ({"hidden_act": "gelu"}, "transformers"),  # torchround's own refuses it
        ({"model_type": "mistral", "architectures": ["MistralForCausalLM"]}, "transformers"),
    ],
)
def test_the_family_of_a_folder_is_the_first_that_reads_it(tmp_path, changes, family):
    release = write_release(tmp_path / "release", **changes)
    tables = {"model": {"hf_path": str(release)}, "data": {"sources": [{"path": "x"}]}}
    options = with_overrides(RawConfig("a test", tables), ())
    assert options.config.model.family == "auto"
    assert with_family(options).config.model.family == family


def without(name):
    return lambda folder: (folder / name).unlink()


def template_less(folder):
    write_kind(folder / "release", "llama2")


def unknown_model(folder):
    write_release(folder / "release", model_type="riddle", architectures=["Riddle"])


def holds_other_run(folder):
    (folder / "outputs/release-chats").mkdir(parents=True)
    (folder / "outputs/release-chats/finetune.toml").write_text("# torchround finetune other chats\n")


# What a user typed, what the message must say, and what is done to the folder before.
BOTH, NO_FOLDER = ["release", "chats"], "neither a folder here nor a repository"
MISTAKES = {
    "a folder's name": (["relaese", "chats"], "MODEL: there is no folder relaese; nearest: release", None),
    "a folder's path": (["./models/x", "chats"], "MODEL: there is no folder ./models/x", None),
    "a file for the model": (["release/config.json", "chats"], "MODEL: release/config.json is a file", None),
    "no config": (BOTH, "model.hf_path: .*no release/config.json", without("release/config.json")),
    "a kind of model": (BOTH, "release/config.json fits no family; transformers: .*riddle", unknown_model),
    "no weights": (BOTH, "release.*safetensors", without("release/model.safetensors")),
    "no tokenizer": (BOTH, "no tokenizer.json in release", without("release/tokenizer.json")),
    "no chat template": (BOTH, "no chat template.*tokenizer.chat_template", template_less),
    "a data file": (["release", "chats/b.jsonl"], "DATA: there is no file or folder .*nearest: chats/a.jsonl", None),
    "a glob": (["release", "chats/*.json"], r"DATA: .*chats/\*.json.*no such file", None),
    "an empty file": (["release", "empty.jsonl"], "DATA: .*empty.jsonl", None),
    "a broken line": (["release", "broken.jsonl"], "DATA: broken.jsonl, line 1: not valid JSON", None),
    "a table in text": (["release", "table.csv"], "DATA: table.csv: CSV and TSV are not read", None),
    "columns": (["release", "columns.jsonl"], "DATA: .*columns story, title; legal: messages or .*data.sources", None),
    "a folder without data": (["release", "nothing"], "DATA: no file in nothing has one of the endings .jsonl", None),
    "a folder that is in use": (["release", "chats", "--out", "chats"], "--out: chats exists, and no run of", None),
    "another run": (BOTH, "holds the run of another command: torchround.* other", holds_other_run),
    "a key": (["release", "chats", "--training.stepps", "3"], "training.stepps: unknown key.*nearest: ", None),
    "a flag": (["release", "chats", "--epochs", "3"], "unexpected argument --epochs.*nearest: --data.epochs", None),
    "a rank": (["release", "chats", "--lora", "0"], "argument --lora: invalid", None),
    "too little memory": ([*BOTH, "--engine.device_memory_gib", "0.0001"], "engine.device_memory_gib", None),
    "a layer for adapters": (["release", "chats", "--lora", "2", "--lora.targets", '["query"]'], "lora.targets", None),
    "a split": (["release", "toy/chats", "--split", "test"], "DATA: dataset .*split 'test'.*source keys: split", None),
    "a name on the hub": (["toy/lama", "chats"], f"MODEL: toy/lama: {NO_FOLDER}", None),
    "a dataset's name": (["release", "toy/chat"], f"DATA: toy/chat: {NO_FOLDER}", None),
    "a gate": (["toy/gated", "chats"], "MODEL: toy/gated: its owner asks for consent: accept .*/toy/gated", None),
    "a full disk": (["toy/large", "chats"], "MODEL: toy/large: (1024 PiB|.* to fetch, and .* are free)", None),
    "no network": (["toy/llama", "chats"], "MODEL: toy/llama: not in the hub's cache .*cannot be reached", "offline"),
}


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    write_release(folder / "model")
    write_lines(folder / "set" / "train.jsonl", CHATS)
    names = {f"models/toy/{name}": folder / "model" for name in ("llama", "gated")}
    large = shutil.copytree(folder / "model", folder / "large")
    (large / "large.safetensors").write_bytes(b"x")
    named = {**names, "models/toy/large": large, "datasets/toy/chats": folder / "set"}
    with hub_of(named, gated={"models/toy/gated"}, sizes={"large.safetensors": 2**60}) as (address, _):
        yield address


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_and_nothing_is_written(name, hub, folder, tmp_path_factory, capsys, monkeypatch):
    arguments, message, change = MISTAKES[name]
    if change == "offline":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            hub, change = f"http://127.0.0.1:{free.getsockname()[1]}", None
    use_hub(monkeypatch, hub, tmp_path_factory.mktemp("cache"))
    (folder / "nothing").mkdir()
    (folder / "empty.jsonl").touch()
    (folder / "broken.jsonl").write_text('{"text": "no end\n')
    (folder / "table.csv").write_text("a,b\n")
    write_lines(folder / "columns.jsonl", [{"story": "x", "title": "y"}])
    if change is not None:
        change(folder)
    before = sorted(folder.rglob("*"))
    try:
        code = finetune.main(arguments)
    except SystemExit as end:  # argparse's own
        code = end.code
    said = capsys.readouterr().err
    assert code == 2 and re.search(message, said, re.DOTALL), said
    assert "Traceback" not in said and sorted(folder.rglob("*")) == before
