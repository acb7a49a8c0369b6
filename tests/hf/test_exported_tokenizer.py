"""An export carries the tokenizer and the chat templates that its run trained with."""

import json

import pytest
from transformers import AutoTokenizer

from tests.support import conversations
from tests.support.conversations import TOOL, answer, plain_text, question, small_tokenizer
from torchround.config import TokenizerTable
from torchround.data import TokenizerError, build_tokenizer
from torchround.data.text.chat import ChatTemplate
from torchround.data.text.template_files import export_tokenizer

LOOP = conversations.LOOP + conversations.PROMPT
OTHER = LOOP.replace("{{ m.content }}", "given {{ m.content }}")
DIALOGUE = [question("one"), answer("two")]


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """Make a released folder: tokenizer, a template, and one more for tools."""
    folder = tmp_path_factory.mktemp("release")
    small_tokenizer(folder, "qwen3")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(LOOP)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | tojson }}" + LOOP)
    return folder


def trained(**table):
    """Return what a checkpoint of a run on conversations holds."""
    table = {"path": None, "name": None, "chat_template": None, **table}
    tokenizer = build_tokenizer(TokenizerTable(**table))
    return {"config": {"tokenizer": table}, "data": {"data": {"chat_template": tokenizer.templates.digest()}}}


def assert_transformers_writes_the_same(folder, table):
    ours, theirs = ChatTemplate(build_tokenizer(table)), AutoTokenizer.from_pretrained(folder)
    for tools in ((), (TOOL,)):
        text = theirs.apply_chat_template(DIALOGUE, tools=list(tools) or None, tokenize=False)
        assert plain_text(ours, DIALOGUE, tools) == text


def test_an_export_has_the_templates_of_the_runs_folder(release, tmp_path):
    names = export_tokenizer(tmp_path, trained(path=str(release)), base=None, tokenizer=release)
    assert names == [
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert_transformers_writes_the_same(tmp_path, TokenizerTable(path=str(release)))


def test_an_export_has_the_template_of_the_key_and_no_other_or_changed_one(release, tmp_path):
    given, target, moved = (tmp_path / name for name in ("given.jinja", "export", "moved"))
    given.write_text(OTHER)
    target.mkdir()
    state = trained(path=str(release), chat_template=str(given))
    assert "additional_chat_templates/tool_use.jinja" not in export_tokenizer(target, state, None, release)
    assert_transformers_writes_the_same(target, TokenizerTable(path=str(release), chat_template=str(given)))
    given.write_text(LOOP)
    with pytest.raises(TokenizerError, match=r"trained with another chat template than the one in .*given.jinja"):
        export_tokenizer(target, state, None, release)
    given.unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer.chat_template: given .*there is no such file"):
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
