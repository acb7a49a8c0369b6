"""Messages as their authors mark them: what is not learnt, reasoning under each of its names, and fields that are dropped."""

import logging
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.conversations import (
    SAME_DAY,
    answer,
    call,
    learnt,
    question,
    released,
    small_tokenizer,
    with_templates,
    written,
)
from torchround.config import SourceTable
from torchround.data import DataError, Tokenizer
from torchround.data.document_types import Conversation, Document
from torchround.data.formats.content import RecordReader
from torchround.data.text.chat import ChatTemplate
from torchround.data.text.messages import REASONING

FAMILIES = {"llama3": "llama3", "qwen3": "qwen3", "qwen3_thinking": "qwen3", "gpt_oss": "gpt_oss"}
EACH_TEMPLATE = pytest.mark.parametrize("name", FAMILIES)
UNLEARNT = pytest.mark.parametrize(
    "mark", [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"weight": 0, "train": False}]
)
LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: tmp_path_factory.mktemp(family) for family in FAMILIES.values()}


@pytest.fixture(scope="module")
def tokenizers(folders: dict[str, Path]) -> dict[str, Tokenizer]:
    made = {family: small_tokenizer(folder, family) for family, folder in folders.items()}
    return {name: made[family] for name, family in FAMILIES.items()}


@pytest.fixture
def templates(tokenizers: dict[str, Tokenizer]) -> dict[str, ChatTemplate]:
    return {name: with_templates(tokenizers[name], released(name)) for name in FAMILIES}


# Weight and train.


@EACH_TEMPLATE
@UNLEARNT
def test_a_message_without_weight_is_written_and_not_learnt(
    templates: dict[str, ChatTemplate], name: str, mark: dict[str, Any]
) -> None:
    def dialogue(**marks: Any) -> list[dict[str, Any]]:
        return [question("one"), answer("first", **marks), question("two"), answer("second")]

    plain, marked = (learnt(templates[name], dialogue(**marks)) for marks in ({}, mark))
    assert "first" in plain[0] and marked == plain[1:]
    as_text = written(templates[name], dialogue(**mark)).replace("⟦", "").replace("⟧", "")
    assert as_text == written(templates[name], dialogue()).replace("⟦", "").replace("⟧", "")


@EACH_TEMPLATE
def test_weight_one_changes_nothing(templates: dict[str, ChatTemplate], name: str) -> None:
    plain = [question("one"), answer("first"), question("two"), answer("second")]
    marked = [message | {"weight": 1, "train": True} for message in plain]
    assert written(templates[name], marked) == written(templates[name], plain)


def test_of_one_turn_with_several_headers_only_the_messages_with_weight_are_learnt(
    templates: dict[str, ChatTemplate],
) -> None:
    """GPT-OSS writes thoughts and answer with a header each, and neighbouring messages as one turn."""
    messages = [
        question("one"),
        answer("", tool_calls=[call("weather", city="Köln")], weight=0),
        {"role": "tool", "content": "rain"},
        answer("draft", weight=0),
        answer("It rains.", thinking="Hm."),
    ]
    end = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>It rains.<|return|>"
    assert learnt(templates["gpt_oss"], messages) == [end]
    messages[-2]["weight"], messages[-1]["weight"] = 1, 0
    assert learnt(templates["gpt_oss"], messages) == ["<|channel|>final<|message|>draft<|end|>"]


def test_calls_without_weight_are_told_from_calls_with_weight(templates: dict[str, ChatTemplate]) -> None:
    messages = [
        question("one"),
        answer("", tool_calls=[call("now")], train=False),
        {"role": "tool", "content": "noon"},
        answer("", tool_calls=[call("weather")]),
    ]
    found = learnt(templates["gpt_oss"], messages)
    assert len(found) == 1 and "functions.weather" in found[0]


@EACH_TEMPLATE
def test_a_conversation_without_any_weight_has_no_labels(templates: dict[str, ChatTemplate], name: str) -> None:
    messages = [question("one"), answer("first", weight=0, thinking="Hm."), question("two"), answer("x", train=False)]
    assert learnt(templates[name], messages) == []


def test_with_loss_on_all_a_message_without_weight_is_not_learnt_either(tokenizers: dict[str, Tokenizer]) -> None:
    template = with_templates(tokenizers["qwen3"], LOOP + PROMPT, loss_on="all")
    messages = [question("one"), answer("first", weight=0), question("two"), answer("second")]
    assert learnt(template, messages) == [
        "<|im_start|>user\none<|im_end|>\n",
        "\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\nsecond<|im_end|>\n",
    ]
    with pytest.raises(DataError, match=r"message 0 \(user\) has weight 0 .* data.loss_on = \"assistant\""):
        template(Conversation((question("one", train=False), answer("two"))))


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ({"weight": 0.5}, r"message 1 \(assistant\): weight = 0.5; legal: 0 \(not learnt\) or 1"),
        ({"weight": "0"}, r"weight = '0'; legal"),
        ({"train": "no"}, r"train = 'no'; legal: true, or false"),
        ({"weight": 1, "train": False}, "weight = 1 and train = False contradict each other"),
        ({"train_detail": [{"begin_offset": 0}]}, "train_detail is not supported"),
    ],
)
def test_any_other_weight_is_an_error_of_the_record(
    templates: dict[str, ChatTemplate], marks: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        templates["qwen3"](Conversation((question("one"), answer("two", **marks))))


JOINS = (
    "{% for m in messages %}{% set follows = not loop.first and messages[loop.index0 - 1].role == m.role %}"
    "{% if m.thinking %}<|start|>assistant<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if not follows %}<|start|>{{ m.role }}<|message|>{% endif %}{{ m.content }}"
    "{% if loop.last or messages[loop.index0 + 1].role != m.role %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_messages_that_a_template_joins_cannot_have_different_weights(tokenizers: dict[str, Tokenizer]) -> None:
    template = with_templates(tokenizers["gpt_oss"], JOINS)
    assert learnt(template, [question("one"), answer("two"), answer("three")]) == ["<|message|>twothree<|end|>"]
    with pytest.raises(DataError, match="does not write each message of the assistant as a turn of its own"):
        template(Conversation((question("one"), answer("two"), answer("three", weight=0))))


# Reasoning.


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_thinking", "gpt_oss"])
def test_reasoning_reaches_the_template_under_each_of_its_names_as_in_transformers(
    templates: dict[str, ChatTemplate], folders: dict[str, Path], name: str, field: str
) -> None:
    messages = [question("one"), answer("two", **{field: "the thought"})]
    text = written(templates[name], messages).replace("⟦", "").replace("⟧", "")
    assert "the thought" in text
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(folders[FAMILIES[name]] / "tokenizer.json"))
    template = SAME_DAY + released(name)
    assert text == theirs.apply_chat_template(messages, chat_template=template, tokenize=False)


@pytest.mark.parametrize("empty", [None, ""])
@pytest.mark.parametrize("field", REASONING)
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_names_of_reasoning_without_a_value_do_not_hide_the_one_that_has_it(
    templates: dict[str, ChatTemplate], name: str, field: str, empty: str | None
) -> None:
    fields = dict.fromkeys(REASONING, empty) | {field: "the thought"}
    assert "the thought" in written(templates[name], [question("one"), answer("two", **fields)])


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning", "tool_calls"])
def test_a_message_of_reasoning_or_calls_needs_no_content(templates: dict[str, ChatTemplate], field: str) -> None:
    value: Any = [call("weather")] if field == "tool_calls" else "the thought"
    reader = RecordReader(SourceTable(path="x.jsonl", content="messages"), templates["qwen3"])
    record = {"messages": [question("one"), {"role": "assistant", "content": None, field: value}]}
    spans = reader.read(Document("x.jsonl", number=1), record)
    assert isinstance(spans, tuple)
    assert ("weather" if field == "tool_calls" else "the thought") in "".join(span.text for span in spans)


# Fields that a template drops.

WITH_FIELDS = [
    question("one"),
    answer("", tool_calls=[call("weather"), call("now")], reasoning="Hm."),
    {"role": "tool", "content": "rain"},
    answer("two"),
]


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return [text.split(" of a conversation")[0].removeprefix("the chat template leaves out ") for text in texts]


def test_each_kind_of_field_that_a_template_drops_is_said_once(
    tokenizers: dict[str, Tokenizer], caplog: pytest.LogCaptureFixture
) -> None:
    template = with_templates(tokenizers["qwen3"], LOOP + PROMPT)
    for _ in range(3):
        template(Conversation(tuple(WITH_FIELDS), (TOOL,)))
    assert sorted(warnings_of(caplog)) == ["reasoning", "tool calls", "tools"]


def test_a_template_that_writes_only_the_first_call_drops_the_second(
    templates: dict[str, ChatTemplate], caplog: pytest.LogCaptureFixture
) -> None:
    templates["gpt_oss"](Conversation(tuple(WITH_FIELDS)))
    assert warnings_of(caplog) == ["tool calls"]


def test_nothing_is_said_of_a_template_that_writes_every_field(
    templates: dict[str, ChatTemplate], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        templates["qwen3"](Conversation(tuple(WITH_FIELDS)))
        templates["qwen3"](Conversation((question("one"), answer("two"))))
    assert warnings_of(caplog) == []
