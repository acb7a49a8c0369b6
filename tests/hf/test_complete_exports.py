"""An exported folder is complete: `transformers` generates text from it, and it has the templates and card of its run."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import train
from tests.support import conversations
from tests.support.batch_contents import TEMPLATE, write_lines
from tests.support.conversations import TOOL, answer, plain_text, question, small_tokenizer
from tests.support.small_run import working_in
from torchround.checkpoint.folders import checkpoint_name
from torchround.commands import export_hf
from torchround.commands.export_hf import byte_tokenizer_files, generation_content
from torchround.config import TokenizerTable
from torchround.data import TokenizerError, build_tokenizer
from torchround.data.text.chat import ChatTemplate
from torchround.data.text.template_files import export_tokenizer
from torchround.hf.export import hub_name, model_card

CONFIG = """
model = { family = "llama3", shape = { num_layers = 1, hidden_size = 16, num_heads = 2, ffn_size = 16 } }
tokenizer = { name = "bytes" }
data = { sources = [{ path = "text.jsonl" }] }
training = { steps = 2, seq_len = 16, global_batch_size = 2, dtype = "float32" }
engine = { devices = "cpu", cpu_threads = 1, measure_steps = 0 }
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with working_in(tmp_path_factory.mktemp("work")) as folder:
        write_lines(folder / "text.jsonl", [{"text": f"line {index} of some text"} for index in range(20)])
        (folder / "own.toml").write_text(CONFIG)
        assert train.main(["--config", "own.toml", "--checkpoint.export=weights"]) == 0
        yield folder


BASE = Path(f"outputs/own/export/{checkpoint_name(2)}")


def head(card):
    assert card.startswith("---\n")
    return yaml.safe_load(card.split("---\n")[1])


def test_a_run_from_scratch_leaves_a_folder_from_which_transformers_generates(folder):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(BASE), AutoTokenizer.from_pretrained(BASE)
    ours = build_tokenizer(TokenizerTable(name="bytes"))
    text = "def f(x):\n    return 'é' + \"\U0001f600\"  # <|eos|>"
    assert tokenizer(text.replace("<|eos|>", "")).input_ids == [256, *ours.encode(text.replace("<|eos|>", ""))]
    assert tokenizer.decode(ours.encode(text)) == text
    assert build_tokenizer(TokenizerTable(path=str(BASE))).encode(text) == ours.encode(text)
    config = model.generation_config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (256, 257, 258)
    assert (model.config.bos_token_id, model.config.eos_token_id) == (256, 257)
    tokens = tokenizer("line", return_tensors="pt")
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[2] = 1e-3  # the end of the text in Llama's vocabulary is an ordinary byte in this one
        assert len(model.generate(**tokens, max_new_tokens=4)[0]) == tokens.input_ids.shape[1] + 4
        model.lm_head.weight.zero_()
        # The end of a document is now the likeliest next token: its logit is a square, the others are 0.
        model.lm_head.weight[257] = model.model(**tokens).last_hidden_state[0, -1]
        found = model.generate(**tokens, max_new_tokens=4, do_sample=False)[0]
    assert found[tokens.input_ids.shape[1] :].tolist() == [257]


RUN = {
    "run": {"name": "x", "seed": 0},
    "model": {"family": "qwen3", "flavor": None, "hf_path": "/secret/place/My-Base"},
    "data": {
        "sources": [
            {"path": "HuggingFaceH4/no_robots", "format": "dataset", "content": "messages", "weight": 2.0},
            {"path": "/secret/files/`|\n# evil.jsonl", "format": "auto", "content": "text", "weight": 1.0},
        ]
    },
    "training": {"seq_len": 8, "dtype": "bfloat16"},
    "lora": {"rank": 4, "alpha": 8.0, "dropout": 0.0, "targets": ["q_proj"]},
}


@pytest.mark.parametrize(
    ("base", "called", "known"),
    [
        ("/home/u/.cache/hub/models--Qwen--Qwen3-1.7B/snapshots/abc", None, "Qwen/Qwen3-1.7B"),
        ("/secret/place/My-Base", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("/secret/place/My-Base", "/home/u/models/base", None),
        ("/secret/place/My-Base", None, None),
    ],
)
def test_a_card_names_the_hub_s_base_and_datasets_but_no_path(base, called, known):
    card = model_card(RUN, 7, 100, Path(base), called, adapters=True)
    found = head(card)
    assert found.get("base_model") == known == hub_name(Path(base), called)
    assert found["datasets"] == ["HuggingFaceH4/no_robots"] and found["library_name"] == "peft"
    assert found["tags"] == ["torchround"]
    assert "/secret" not in card and "/home" not in card
    assert "\n# evil" not in card and "``" not in card.replace("```", "")
    assert known or "trained from `My-Base`" in card


def test_after_chats_generation_also_stops_at_the_end_of_a_turn(folder):
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}
    write_lines(Path("chats.jsonl"), [chat] * 20)
    Path("template.jinja").write_text(TEMPLATE)
    # A base whose own settings stop at another token, as a pre-trained base does.
    base = Path(shutil.copytree(BASE, "base"))
    settings = json.loads((base / "tokenizer_config.json").read_text()) | {"eos_token": "<|pad|>"}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": 258, "temperature": 0.6}))
    chats = [
        f"--model.hf_path={base}",
        "--model.shape=none",
        "--tokenizer.name=none",
        "--tokenizer.chat_template=template.jinja",
        '--data.sources=[{path = "chats.jsonl", content = "messages"}]',
    ]
    assert train.main(["--config", "own.toml", "--run.name=chat", *chats, "--checkpoint.export=weights"]) == 0
    output = Path(f"outputs/chat/export/{checkpoint_name(2)}")
    found = json.loads((output / "generation_config.json").read_text())
    assert found["eos_token_id"] == [258, 257] and found["temperature"] == 0.6
    assert GenerationConfig.from_pretrained(output).eos_token_id == [258, 257]
    assert (output / "chat_template.jinja").read_text() == TEMPLATE


def test_ids_of_another_vocabulary_are_not_kept(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 2], "top_p": 0.9}))
    ids = {"bos_token_id": None, "eos_token_id": 5, "pad_token_id": 6}
    content = generation_content(str(tmp_path), ids, same_tokens=False)
    assert content == {"top_p": 0.9, "eos_token_id": 5, "pad_token_id": 6}
    assert generation_content(str(tmp_path), ids, same_tokens=True)["eos_token_id"] == [1, 2, 5]
    assert generation_content(None, ids, same_tokens=False) == {"eos_token_id": 5, "pad_token_id": 6}


def test_a_tokenizer_that_is_gone_stops_no_export_but_is_said(folder, caplog):
    (folder / "tok").mkdir()
    files = byte_tokenizer_files(build_tokenizer(TokenizerTable(name="bytes")))
    for name, content in files.items():
        (folder / "tok" / name).write_text(json.dumps(content))
    assert train.main(["--config", "own.toml", "--run.name=gone", "--tokenizer.name=none", "--tokenizer.path=tok"]) == 0
    (folder / "tok" / "tokenizer.json").unlink()
    assert (
        export_hf.main(
            [f"outputs/gone/checkpoints/{checkpoint_name(2)}", "exported", "--config=outputs/gone/config.toml"]
        )
        == 0
    )
    assert "the export has no generation_config.json of its own" in caplog.text
    assert Path("exported/model.safetensors").is_file()


LOOP = conversations.LOOP + conversations.PROMPT
OTHER = LOOP.replace("{{ m.content }}", "given {{ m.content }}")
DIALOGUE = [question("one"), answer("two")]


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    folder = tmp_path_factory.mktemp("release")
    small_tokenizer(folder, "qwen3")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(LOOP)
    return folder


def trained(**table):
    table = {"path": None, "name": None, "chat_template": None, **table}
    tokenizer = build_tokenizer(TokenizerTable(**table))
    return {"config": {"tokenizer": table}, "data": {"data": {"chat_template": tokenizer.template.digest()}}}


def assert_transformers_writes_the_same(folder, table):
    ours, theirs = ChatTemplate(build_tokenizer(table)), AutoTokenizer.from_pretrained(folder)
    for tools in ((), (TOOL,)):
        text = theirs.apply_chat_template(DIALOGUE, tools=list(tools) or None, tokenize=False)
        assert plain_text(ours, DIALOGUE, tools) == text


def test_an_export_has_the_template_of_the_runs_folder(release, tmp_path):
    names = export_tokenizer(tmp_path, trained(path=str(release)), base=None, tokenizer=release)
    assert names == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    assert_transformers_writes_the_same(tmp_path, TokenizerTable(path=str(release)))


def test_an_export_has_the_template_of_the_key_and_no_other_or_changed_one(release, tmp_path):
    given, target, moved = (tmp_path / name for name in ("given.jinja", "export", "moved"))
    given.write_text(OTHER)
    target.mkdir()
    state = trained(path=str(release), chat_template=str(given))
    export_tokenizer(target, state, None, release)
    assert_transformers_writes_the_same(target, TokenizerTable(path=str(release), chat_template=str(given)))
    given.write_text(LOOP)
    with pytest.raises(TokenizerError, match=r"trained with another chat template than the one in .*given.jinja"):
        export_tokenizer(target, state, None, release)
    given.unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer.chat_template: given .*cannot be read: .*No such file"):
        export_tokenizer(target, state, None, release)
    moved.mkdir()
    (moved / "chat_template.jinja").write_text(OTHER)
    state["config"]["tokenizer"]["chat_template"] = None  # as an export that is given a tokenizer
    (target / "chat_template.jinja").unlink()
    assert export_tokenizer(target, state, None, moved) == ["chat_template.jinja"]
    assert (target / "chat_template.jinja").read_text() == OTHER


def test_a_run_on_bytes_does_not_export_the_tokenizer_of_its_base(release, tmp_path):
    assert export_tokenizer(tmp_path, {"config": {"tokenizer": {"path": None, "name": "bytes"}}}, release) == []
    state = {"config": {"tokenizer": {"path": None, "name": None}}}
    assert "tokenizer.json" in export_tokenizer(tmp_path, state, release)
