"""An export carries the tokenizer and the chat templates that its run trained with."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.support.conversations import answer, question, small_tokenizer, written
from torchround.config import TokenizerTable
from torchround.data import TokenizerError, build_tokenizer
from torchround.data.text.chat import ChatTemplate
from torchround.data.text.template_files import export_tokenizer

PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT
OTHER = LOOP.replace("{{ m.content }}", "given {{ m.content }}")
DIALOGUE = [question("one"), answer("two")]
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a released folder: tokenizer, a template, and one more for tools."""
    folder = tmp_path_factory.mktemp("release")
    small_tokenizer(folder, "qwen3")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(LOOP)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | tojson }}" + LOOP)
    return folder


def trained(**table: Any) -> dict[str, Any]:
    """Return what a checkpoint of a run on conversations holds."""
    table = {"path": None, "name": None, "chat_template": None, **table}
    tokenizer = build_tokenizer(TokenizerTable(**table))
    return {"config": {"tokenizer": table}, "data": {"data": {"chat_template": tokenizer.templates.digest()}}}


def assert_transformers_writes_the_same(folder: Path, table: TokenizerTable) -> None:
    ours, theirs = ChatTemplate(build_tokenizer(table)), AutoTokenizer.from_pretrained(folder)
    for tools in ((), (TOOL,)):
        text = written(ours, DIALOGUE, tools).replace("⟦", "").replace("⟧", "")
        assert theirs.apply_chat_template(DIALOGUE, tools=list(tools) or None, tokenize=False) == text


def test_an_export_has_the_templates_of_the_runs_folder(release: Path, tmp_path: Path) -> None:
    names = export_tokenizer(tmp_path, trained(path=str(release)), base=None, tokenizer=release)
    assert names == [
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert_transformers_writes_the_same(tmp_path, TokenizerTable(path=str(release)))


def test_an_export_has_the_template_of_the_key_and_no_other(release: Path, tmp_path: Path) -> None:
    given, target = tmp_path / "given.jinja", tmp_path / "export"
    given.write_text(OTHER)
    target.mkdir()
    state = trained(path=str(release), chat_template=str(given))
    assert "additional_chat_templates/tool_use.jinja" not in export_tokenizer(target, state, None, release)
    assert_transformers_writes_the_same(target, TokenizerTable(path=str(release), chat_template=str(given)))


def test_a_template_that_has_changed_since_the_run_is_refused(release: Path, tmp_path: Path) -> None:
    given, target = tmp_path / "given.jinja", tmp_path / "export"
    given.write_text(OTHER)
    target.mkdir()
    state = trained(path=str(release), chat_template=str(given))
    given.write_text(LOOP)
    with pytest.raises(TokenizerError, match=r"trained with another chat template than the one in .*given.jinja"):
        export_tokenizer(target, state, None, release)
    given.unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer.chat_template: given .*there is no such file"):
        export_tokenizer(target, state, None, release)
    moved = tmp_path / "moved"
    moved.mkdir()
    (moved / "chat_template.jinja").write_text(OTHER)
    state["config"]["tokenizer"]["chat_template"] = None  # as an export that is given a tokenizer
    assert export_tokenizer(target, state, None, moved) == ["chat_template.jinja"]
    assert (target / "chat_template.jinja").read_text() == OTHER


def test_a_run_on_bytes_does_not_export_the_tokenizer_of_its_base(release: Path, tmp_path: Path) -> None:
    assert export_tokenizer(tmp_path, {"config": {"tokenizer": {"path": None, "name": "bytes"}}}, release) == []
    state = {"config": {"tokenizer": {"path": None, "name": None}}}
    assert "tokenizer.json" in export_tokenizer(tmp_path, state, release)
