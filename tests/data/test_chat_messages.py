"""Messages as their authors mark them: what is not learnt, reasoning under each of its names, and fields that are dropped."""

import logging

import pytest
from transformers import PreTrainedTokenizerFast

from tests.support.conversations import (
    LOOP,
    PROMPT,
    SAME_DAY,
    TOOL,
    answer,
    call,
    learnt,
    plain_text,
    question,
    released,
    with_templates,
    written,
)
from torchround.config import SourceTable
from torchround.data import DataError
from torchround.data.document_types import Conversation, Document
from torchround.data.formats.content import RecordReader
from torchround.data.text.messages import REASONING

FAMILIES = {"llama3": "llama3", "qwen3": "qwen3", "qwen3_thinking": "qwen3", "gpt_oss": "gpt_oss"}
EACH_TEMPLATE = pytest.mark.parametrize("name", FAMILIES)


@pytest.fixture(scope="module")
def templates(chat_tokenizers):
    return {name: with_templates(chat_tokenizers[family], released(name)) for name, family in FAMILIES.items()}


# Weight and train.


@EACH_TEMPLATE
def test_a_message_without_weight_is_written_and_not_learnt(templates, name):
    def dialogue(**marks):
        return [question("one"), answer("first", **marks), question("two"), answer("second")]

    plain = learnt(templates[name], dialogue())
    assert "first" in plain[0]
    for mark in ({"weight": 0}, {"train": False}, {"weight": 0.0, "train": False}):
        assert learnt(templates[name], dialogue(**mark)) == plain[1:]
        assert plain_text(templates[name], dialogue(**mark)) == plain_text(templates[name], dialogue())
    ones = [message | {"weight": 1, "train": True} for message in dialogue()]
    assert written(templates[name], ones) == written(templates[name], dialogue())
    none = [question("one"), answer("first", weight=0, thinking="Hm."), question("two"), answer("x", train=False)]
    assert learnt(templates[name], none) == []


def test_of_one_turn_with_several_headers_only_the_messages_with_weight_are_learnt(templates):
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


def test_with_loss_on_all_a_message_without_weight_is_not_learnt_either(chat_tokenizers):
    template = with_templates(chat_tokenizers["qwen3"], LOOP + PROMPT, loss_on="all")
    messages = [question("one"), answer("first", weight=0), question("two"), answer("second")]
    assert learnt(template, messages) == [
        "<|im_start|>user\none<|im_end|>\n",
        "\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\nsecond<|im_end|>\n",
    ]
    with pytest.raises(DataError, match=r"message 0 \(user\) has weight 0 .* data.loss_on = \"assistant\""):
        template(Conversation((question("one", train=False), answer("two"))))


JOINS = (
    "{% for m in messages %}{% set follows = not loop.first and messages[loop.index0 - 1].role == m.role %}"
    "{% if m.thinking %}<|start|>assistant<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if not follows %}<|start|>{{ m.role }}<|message|>{% endif %}{{ m.content }}"
    "{% if loop.last or messages[loop.index0 + 1].role != m.role %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def test_messages_that_a_template_joins_cannot_have_different_weights(chat_tokenizers):
    template = with_templates(chat_tokenizers["gpt_oss"], JOINS)
    assert learnt(template, [question("one"), answer("two"), answer("three")]) == ["<|message|>twothree<|end|>"]
    with pytest.raises(DataError, match="does not write each message of the assistant as a turn of its own"):
        template(Conversation((question("one"), answer("two"), answer("three", weight=0))))


# Reasoning.


@pytest.mark.parametrize("name", ["qwen3", "qwen3_thinking", "gpt_oss"])
def test_reasoning_reaches_the_template_under_each_of_its_names_as_in_transformers(templates, chat_folders, name):
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(chat_folders[FAMILIES[name]] / "tokenizer.json"))
    for field in REASONING:
        messages = [question("one"), answer("two", **{field: "the thought"})]
        text = plain_text(templates[name], messages)
        assert "the thought" in text
        template = SAME_DAY + released(name)
        assert text == theirs.apply_chat_template(messages, chat_template=template, tokenize=False)
        for empty in (None, ""):  # names without a value do not hide the one that has it
            fields = dict.fromkeys(REASONING, empty) | {field: "the thought"}
            assert plain_text(templates[name], [question("one"), answer("two", **fields)]) == text


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning", "tool_calls"])
def test_a_message_of_reasoning_or_calls_needs_no_content(templates, field):
    value = [call("weather")] if field == "tool_calls" else "the thought"
    reader = RecordReader(SourceTable(path="x.jsonl", content="messages"), templates["qwen3"])
    record = {"messages": [question("one"), {"role": "assistant", "content": None, field: value}]}
    text = "".join(span.text for span in reader.read(Document("x.jsonl", number=1), record))
    assert ("weather" if field == "tool_calls" else "the thought") in text


# Fields that a template drops.

WITH_FIELDS = (
    question("one"),
    answer("", tool_calls=[call("weather"), call("now")], reasoning="Hm."),
    {"role": "tool", "content": "rain"},
    answer("two"),
)


def warnings_of(caplog):
    texts = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    return sorted(text.split(" of a conversation")[0].removeprefix("the chat template leaves out ") for text in texts)


def test_each_kind_of_field_that_a_template_drops_is_said_once_and_no_other(chat_tokenizers, caplog):
    drops = with_templates(chat_tokenizers["qwen3"], LOOP + PROMPT)
    first_call = with_templates(chat_tokenizers["gpt_oss"], released("gpt_oss"))
    every = with_templates(chat_tokenizers["qwen3"], released("qwen3"))
    for template, tools, expected in (
        (drops, (TOOL,), ["reasoning", "tool calls", "tools"]),
        (first_call, (), ["tool calls"]),
        (every, (), []),
    ):
        caplog.clear()
        for _ in range(3):
            template(Conversation(WITH_FIELDS, tools))
        assert warnings_of(caplog) == expected
