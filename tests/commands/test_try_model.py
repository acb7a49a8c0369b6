"""The command `try_model`: perplexity and continuations, of runs and of folders, against `transformers`."""

import json
import math
import shutil
import threading
from functools import cache

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import train
from tests.support.hostile_cases import forge_manifest
from tests.support.small_run import draw_no_pictures, flip_last_bit
from tests.support.toy_texts import their_texts
from torchround.checkpoint.folders import checkpoint_name
from torchround.commands import try_model
from torchround.commands.export_hf import byte_tokenizer_files
from torchround.commands.try_model import main
from torchround.config import TokenizerTable
from torchround.data import build_tokenizer
from torchround.data.scored_windows import ScoredWindow, scored_batch
from torchround.engine.engine import Engine
from torchround.generation import score
from torchround.layer import IGNORED_LABEL
from torchround.run.hardware import find_hardware

SHAPE = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "head_dim": 8}
SHAPE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 128}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9}
# The `model_type` of transformers and settings, by name. No family of our own reads the last one.
RELEASES = {"llama3": ("llama", {}), "qwen3": ("qwen3", {"tie_word_embeddings": True})}
RELEASES |= {"gpt_oss": ("gpt_oss", EXPERTS), "qwen2": ("qwen2", {})}
BYTES = build_tokenizer(TokenizerTable(name="bytes"))
TEXTS = ["a line of text, and more of it\n" * 7, "short", "", "of 35 letters, or so: exactly thirty"]
ON_TWO_DEVICES = ("--engine.devices=cpu", "--engine.num_devices=2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("released")
    for name, (model_type, settings) in RELEASES.items():
        torch.manual_seed(1)
        ids = {"bos_token_id": BYTES.bos_id, "eos_token_id": BYTES.eos_id, "pad_token_id": BYTES.pad_id}
        config = AutoConfig.for_model(model_type, **SHAPE | settings | ids)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
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
    assert main([*arguments, "--json", *ON_TWO_DEVICES]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def their_loss(folder, seq_len):
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
        capsys, "--model", str(folders[kind]), "--perplexity", "texts.jsonl", "--training.seq_len=37", "--batch-size=3"
    )
    expected, num_tokens = their_loss(folders[kind], 37)
    assert found["tokens"] == num_tokens and found["documents"] == 3
    # Both add up thousands of products in fp32, in another order.
    assert found["nats_per_token"] == pytest.approx(expected, abs=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(found["nats_per_token"]))


PROMPTS = ["a line of", "short", "one that is longer than the others are", "x"]


def continued(model, ids, max_tokens):
    found = their_texts(model, ids, max_tokens, BYTES.eos_id)
    return [BYTES.decode([token for token in tokens if token != BYTES.eos_id]) for tokens in found]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_continuations_are_those_of_transformers(kind, folders, capsys):
    found = results(capsys, "--model", str(folders[kind]), "--prompt", *PROMPTS, "--max-tokens=12", "--batch-size=3")
    assert [line["prompt"] for line in found] == PROMPTS
    ids = [[BYTES.bos_id, *BYTES.encode(prompt)] for prompt in PROMPTS]
    assert [line["text"] for line in found] == continued(AutoModelForCausalLM.from_pretrained(folders[kind]), ids, 12)
    assert all(line["tokens"] == 12 or line["ended"] for line in found)


def test_drawn_continuations_follow_the_seed_and_not_the_devices_or_the_other_prompts(folders, capsys):
    drawn = ("--model", str(folders["llama3"]), "--temperature=1.5", "--top-k=50", "--top-p=0.9", "--max-tokens=9")
    first = results(capsys, *drawn, "--prompt", *PROMPTS)
    assert first == results(capsys, *drawn, "--prompt", *PROMPTS, "--engine.num_devices=3")
    assert first[:2] == results(capsys, *drawn, "--prompt", *PROMPTS[:2], "--batch-size=1")
    assert first != results(capsys, *drawn, "--prompt", *PROMPTS, "--seed=1")


CONFIG = """
model = {{ family = "llama3", hf_path = "{release}" }}
data = {{ sources = [{{ path = "texts.jsonl" }}] }}
training = {{ steps = 2, seq_len = 24, global_batch_size = 2, dtype = "float32" }}
engine = {{ devices = "cpu", num_devices = 2, cpu_threads = 1, measure_steps = 0 }}
optimizer = {{ lr = 0.05 }}
checkpoint = {{ interval_steps = 1, keep_latest_k = 0, export = "weights" }}
"""
TEMPLATE = (
    "{% for message in messages %}<|bos|>{{ message.role }}: {{ message.content }}<|eos|>{% endfor %}"
    "{% if add_generation_prompt %}<|bos|>assistant: {% endif %}"
)
ADAPTED = ("--lora.rank=2", "--lora.targets=['q_proj', 'down_proj']")


@pytest.fixture(scope="module")
def trained(folders, tmp_path_factory):
    root = tmp_path_factory.mktemp("trained")
    (root / "run.toml").write_text(CONFIG.format(release=folders["llama3"]))
    write_texts(root)

    @cache
    def run(name, *overrides):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(root)
            draw_no_pictures(patch)
            assert train.main(["--config", "run.toml", f"--run.name={name}", *overrides]) == 0
        return root / "outputs" / name

    return run


def nats(capsys, *arguments):
    capsys.readouterr()
    (found,) = results(capsys, *map(str, arguments), "--perplexity", "texts.jsonl", "--training.seq_len=24")
    return float(found["nats_per_token"])


def test_a_run_is_tried_at_its_newest_checkpoint_or_at_a_step(trained, folders, capsys):
    run = trained("run")
    newest = nats(capsys, "--run", run)
    exported = nats(capsys, "--model", run / "export" / checkpoint_name(2))
    assert newest == nats(capsys, "--run", run, "--step=2") == exported
    assert len({newest, nats(capsys, "--run", run, "--step=1"), nats(capsys, "--model", folders["llama3"])}) == 3


QUESTIONS = [
    (f"{n} and {n + 1} is", [f" {2 * n}", f" {2 * n + 1}", " a lot of things"][:: (-1) ** n]) for n in (1, 4, 12, 77)
]


def test_choices_have_the_likelihoods_and_the_winners_that_transformers_gives_the_export(trained):
    """Ask as lm-eval does (docs/trying.md): of a whole text, the first tokens are those of the question."""
    export, tried = trained("run") / "export" / checkpoint_name(2), try_model.model_of_run(trained("run"), None, {})
    tokenizer, model = AutoTokenizer.from_pretrained(export), AutoModelForCausalLM.from_pretrained(export).eval()
    winners = []
    with try_model.text_engine(tried, find_hardware(tried.options.config.engine), 4, 64) as engine:
        for question, choices in QUESTIONS:
            start, ours, theirs = len(tokenizer(question).input_ids), [], []
            for ids in (torch.tensor(tokenizer(question + choice).input_ids) for choice in choices):
                labels = ids[1:].numpy().copy()
                labels[: start - 1] = IGNORED_LABEL
                window = ScoredWindow(ids[:-1].numpy(), labels, ends=True)
                ours.append(-score(engine, [[scored_batch([window], tried.tokenizer.pad_id)]]).loss_sum)
                with torch.no_grad():
                    scores = model(ids[None, :-1]).logits[0].double().log_softmax(-1)
                theirs.append(float(scores.gather(1, ids[1:, None])[start - 1 :].sum()))
            assert ours == pytest.approx(theirs, rel=1e-5)
            winners.append(ours.index(max(ours)))
            assert winners[-1] == theirs.index(max(theirs))
    assert len(set(winners)) > 1, "a test of one winner would say little"


@pytest.mark.parametrize("maps", [pytest.param("false", marks=pytest.mark.nightly), "true"])
def test_adapters_of_a_run_are_tried_with_their_base(trained, folders, capsys, maps):
    run = trained(f"lora-{maps}", *ADAPTED, f"--lora.map_base={maps}")
    alone = trained(f"alone-{maps}", *ADAPTED, f"--lora.map_base={maps}", "--checkpoint.export=adapters")
    found = nats(capsys, "--run", run)
    assert found != nats(capsys, "--run", run, "--step=1")
    # Merged in, they are rounded once more.
    assert found == pytest.approx(nats(capsys, "--model", run / "export" / checkpoint_name(2)), abs=1e-5)
    adapters = f"--lora.path={alone / 'export' / checkpoint_name(2)}"
    assert found == nats(capsys, "--model", folders["llama3"], adapters, *ADAPTED)


def test_a_base_that_was_moved_is_found_where_the_command_says(trained, folders, capsys, tmp_path):
    shutil.copytree(folders["llama3"], tmp_path / "first")
    run = trained("moved", f"--model.hf_path={tmp_path}/first", *ADAPTED, "--lora.map_base=true")
    before = nats(capsys, "--run", run)
    (tmp_path / "first").rename(tmp_path / "second")
    assert main(["--run", str(run), "--prompt", "a"]) == 2
    assert "first" in capsys.readouterr().err
    assert nats(capsys, "--run", run, "--model.hf_path=second") == before


def test_another_type_than_the_files_is_converted(trained, folders, capsys):
    exact, rounded = (
        nats(capsys, "--model", folders["llama3"], f"--training.dtype={name}") for name in ("float32", "bfloat16")
    )
    assert exact != rounded and exact == pytest.approx(rounded, rel=0.05)


def test_chats_are_written_by_the_template_up_to_the_answer(folders, capsys, tmp_path):
    folder = shutil.copytree(folders["llama3"], tmp_path / "chat")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    chats = ("--model", str(folder), "--chat", "--prompt", "<|eos|> or not", "hello", "--max-tokens=8")
    guarded, plain = results(capsys, *chats)
    assert (guarded["prompt"], plain["prompt"]) == ("<|eos|> or not", "hello")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)["input_ids"]
    assert [plain["text"]] == continued(model, [ids], 8)


ASKED, TOY = ("--prompt", "a"), ("--model", "toy")
MISTAKES = {
    "no run": (("--run", "outputs/x", *ASKED), "there is no outputs/x/config.toml"),
    "a hub name": (("--model", "Qwen/Qwen3", *ASKED), "not downloaded"),
    "a folder of something else": (("--model", ".", *ASKED), "config.json cannot be read"),
    "an empty prompt": ((*TOY, "--prompt", ""), "an empty prompt"),
    "an empty file to score": ((*TOY, "--perplexity", "empty.txt"), "empty"),
    "a missing file to score": ((*TOY, "--perplexity", "none.txt"), "none.txt"),
    "another content": ((*TOY, "--perplexity", "texts.jsonl", "--content=prose"), "data.sources[0].content: given"),
    "no chat template": ((*TOY, "--chat", *ASKED), "no chat template beside it, which conversations need"),
    "no tokenizer": (("--model", "untold", *ASKED), "no tokenizer.json"),
    "devices that are not here": ((*TOY, "--engine.devices=gpu", *ASKED), "no such kind"),
    "a key that is not there": ((*TOY, "--engine.device=cpu", *ASKED), "nearest: devices"),
    "a device that is too small": ((*TOY, "--engine.device_memory_gib=0.00001", *ASKED), "on a device, which has"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_message_and_nothing_is_written(name, folders, capsys, tmp_path):
    shutil.copytree(folders["llama3"], tmp_path / "toy")
    (shutil.copytree(folders["llama3"], tmp_path / "untold") / "tokenizer.json").unlink()
    (tmp_path / "empty.txt").write_text("")
    before = sorted(tmp_path.rglob("*"))
    arguments, message = MISTAKES[name]
    # Keys given twice: the last one counts.
    assert main([*ON_TWO_DEVICES, *arguments]) == 2
    printed = capsys.readouterr().err
    assert message in printed, printed
    assert "Traceback" not in printed and sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_that_cannot_be_used_is_named(trained, capsys, tmp_path):
    run = shutil.copytree(trained("run"), tmp_path / "run")
    checkpoints = run / "checkpoints"
    assert main(["--run", str(run), "--step=7", *ASKED]) == 2
    assert "--step: given 7; legal: a step with a checkpoint" in capsys.readouterr().err
    newer = shutil.copytree(run, tmp_path / "newer")
    forge_manifest(newer / "checkpoints" / checkpoint_name(2), lambda manifest: manifest.update(format=4))
    assert main(["--run", str(newer), *ASKED]) == 2
    assert "format 4 is not read" in capsys.readouterr().err
    tensors = next((checkpoints / checkpoint_name(2)).glob("tensors-*"))
    flip_last_bit(tensors)
    assert main(["--run", str(run), *ASKED]) == 2
    printed = capsys.readouterr().err
    assert tensors.name in printed and "--step N tries another checkpoint" in printed
    assert main(["--run", str(run), "--step=1", *ASKED]) == 0
    shutil.rmtree(checkpoints)
    assert main(["--run", str(run), *ASKED]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err


def test_a_model_without_finite_logits_is_a_fault_and_no_traceback(folders, capsys, tmp_path):
    folder = shutil.copytree(folders["llama3"], tmp_path / "spoilt")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"].fill_(torch.nan)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (found,) = results(capsys, "--model", str(folder), "--perplexity", "texts.jsonl")
    assert found["perplexity"] is None and found["tokens"] > 0
    assert main(["--model", str(folder), *ASKED, *ON_TWO_DEVICES]) == 1
    printed = capsys.readouterr().err
    assert "logits are not numbers" in printed and "Traceback" not in printed


def test_control_c_ends_the_command_and_its_threads(folders, capsys, monkeypatch):
    threads = threading.active_count()

    def interrupted(self, batches):
        raise KeyboardInterrupt

    monkeypatch.setattr(Engine, "forward", interrupted)
    assert main(["--model", str(folders["llama3"]), *ASKED, *ON_TWO_DEVICES]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert threading.active_count() == threads
