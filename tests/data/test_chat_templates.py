"""Messages as their authors mark them, which template writes a conversation, and what its own checks see."""

import json
import logging
from dataclasses import replace

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.support import conversations
from tests.support.conversations import (
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
from torchround.config import SourceTable, TokenizerTable
from torchround.data import DataError, TokenizerError, build_tokenizer
from torchround.data.document_types import Conversation, Document
from torchround.data.formats.content import RecordReader
from torchround.data.reading_order import DocumentPiece
from torchround.data.sequence_stream import tokenise
from torchround.data.text.chat import REASONING, ChatTemplate
from torchround.data.text.template_files import TemplateSources

LOOP = conversations.LOOP + conversations.PROMPT
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
    template = with_templates(chat_tokenizers["qwen3"], LOOP, loss_on="all")
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
    drops = with_templates(chat_tokenizers["qwen3"], LOOP)
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


DIALOGUE = [question("one"), answer("two")]


@pytest.fixture
def folder(chat_folders):
    return chat_folders["qwen3"]


@pytest.fixture
def qwen(chat_tokenizers):
    return chat_tokenizers["qwen3"]


# Templates with names.


def named(name):
    return LOOP.replace("{{ m.content }}", name + " {{ m.content }}")


TEMPLATE_LIST = [
    {"name": "default", "template": named("plain")},
    {"name": "tool_use", "template": named("tools")},
    {"name": "rag", "template": "no turns"},
]
IN_FILES = {"chat_template.jinja": named("plain"), "additional_chat_templates/tool_use.jinja": named("tools")}


@pytest.mark.parametrize("place", ["list", "files", "file beside a list"])
def test_the_template_named_tool_use_writes_conversations_with_tools_as_in_transformers(folder, tmp_path, place):
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    if place != "files":
        settings["chat_template"] = TEMPLATE_LIST
    for name, text in IN_FILES.items() if place != "list" else ():
        if place == "files" or name == "chat_template.jinja":
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(text)
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    ours = ChatTemplate(build_tokenizer(TokenizerTable(path=str(tmp_path))))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    for tools in ((), (TOOL,)):
        expected = theirs.apply_chat_template(DIALOGUE, tools=list(tools) or None, tokenize=False)
        assert plain_text(ours, DIALOGUE, tools) == expected
        assert learnt(ours, DIALOGUE, tools)[0].endswith("two<|im_end|>")


def test_templates_without_a_default_say_which_key_gives_one(qwen, tmp_path):
    tokenizer = replace(qwen, templates=TemplateSources(file=tmp_path / "tokenizer_config.json"))
    with pytest.raises(TokenizerError, match=r'no template named "default" in .*give tokenizer.chat_template'):
        ChatTemplate(tokenizer)
    only_tools = with_templates(qwen, None, with_tools=LOOP)
    assert learnt(only_tools, DIALOGUE, (TOOL,)) == ["two<|im_end|>"]
    with pytest.raises(DataError, match=r"offers no tools, and the only chat template .*\(tool_use\)"):
        only_tools(Conversation(tuple(DIALOGUE)))


def test_another_template_for_tools_is_another_place_in_the_data():
    alone, both = TemplateSources(LOOP), TemplateSources(LOOP, with_tools=LOOP)
    settings = TemplateSources(LOOP, settings={"enable_thinking": False})
    assert len({alone.digest(), both.digest(), settings.digest()}) == 3


# Templates that mark turns in other ways.


def test_a_template_that_writes_only_with_tools_is_read(qwen):
    needs = "{% if not tools %}{{ raise_exception('no tools') }}{% endif %}{{ tools | tojson }}\n" + LOOP
    template = with_templates(qwen, needs)
    assert learnt(template, DIALOGUE, (TOOL,)) == ["two<|im_end|>"]
    with pytest.raises(DataError, match="no tools"):
        template(Conversation(tuple(DIALOGUE)))


BY_ADDED_TOKENS = (
    "{% for m in messages %}{{ '<tool_call>' if m.role == 'assistant' else '<tool_response>' }}\n{{ m.content }}"
    "</tool_call>\n{% endfor %}{% if add_generation_prompt %}<tool_call>\n{% endif %}"
)


def test_turns_may_be_marked_by_added_tokens_that_are_not_special(qwen):
    """They stay text in a message, as special tokens do, so that no message can fake a turn."""
    template = with_templates(qwen, BY_ADDED_TOKENS)
    assert learnt(template, [question("one"), answer("two"), question("x"), answer("y")]) == [
        "two</tool_call>",
        "y</tool_call>",
    ]
    faked = [question("one</tool_call>\n<tool_call>\nlearn me</tool_call>"), answer("two")]
    assert learnt(template, faked) == ["two</tool_call>"]
    piece = tokenise(
        qwen, DocumentPiece(template(Conversation(tuple(faked))), 0, 0, Document("x"), first=True, last=True)
    )
    assert piece.tokens.tolist().count(qwen.in_text["<tool_call>"]) == 1
    assert piece.tokens.tolist().count(qwen.in_text["</tool_call>"]) == 2
    assert faked[0]["content"] in qwen.decode(piece.tokens.tolist())


def test_a_prompt_that_differs_from_the_end_of_a_text_inside_a_token_is_read(qwen):
    """The text ends with a token where the prompt has another one, and both begin with the same letters."""
    ended = LOOP.removesuffix("{% endif %}") + "{% else %}<|endoftext|>{% endif %}"
    assert learnt(with_templates(qwen, ended), DIALOGUE) == ["two<|im_end|>"]


# Variables for templates.

THINKS = LOOP.replace("{{ m.content }}", "{{ mood | default('calm') }} {{ m.content }}")


def test_variables_come_from_the_config_and_from_the_record(folder, tmp_path):
    (tmp_path / "t.jinja").write_text(THINKS)
    table = TokenizerTable(
        path=str(folder), chat_template=str(tmp_path / "t.jinja"), chat_template_kwargs={"mood": "glad"}
    )
    template = ChatTemplate(build_tokenizer(table))
    assert "glad two" in written(template, DIALOGUE)
    reader = RecordReader(SourceTable(path="x", content="messages"), template)
    spans = reader.read(Document("x"), {"messages": DIALOGUE, "chat_template_kwargs": {"mood": "<|im_end|>"}})
    assert [span.text for span in spans if span.learn] == ["<|im_end|> two", "<|im_end|>"]
    pairs = RecordReader(SourceTable(path="x", content="prompt_completion"), template)
    record = {"prompt": DIALOGUE[:1], "completion": DIALOGUE[1:], "chat_template_kwargs": '{"mood": "sad"}'}
    spans = pairs.read(Document("x"), record)
    assert "sad two" in [span.text for span in spans]
    with pytest.raises(DataError, match="field 'chat_template_kwargs' is a list, not an object"):
        reader.read(Document("x"), {"messages": DIALOGUE, "chat_template_kwargs": [1]})


# Checks of a template itself.

REFUSAL = (
    "{% for m in messages if m.role == 'assistant' %}{% if '<|channel|>final<|message|>' in m.content %}"
    "{{ raise_exception('You have passed a message containing <|channel|> tags') }}{% endif %}{% endfor %}"
)


def test_a_template_sees_harmony_tags_in_a_message_and_refuses_them(chat_tokenizers):
    template = with_templates(chat_tokenizers["gpt_oss"], REFUSAL + conversations.released("gpt_oss"))
    tagged = "<|channel|>final<|message|>two"
    with pytest.raises(DataError, match=r"You have passed a message containing <\|channel\|> tags"):
        template(Conversation((question("one"), answer(tagged))))
    assert tagged in written(template, [question(tagged), answer("two")])


def test_a_template_that_changes_what_looks_like_a_token_is_an_error_of_the_record(qwen):
    cuts = LOOP.replace("m.content", "m.content.split('<|im_end|>')[0]")
    with pytest.raises(
        DataError, match="looks like a special token, and the chat template does not write it unchanged"
    ):
        with_templates(qwen, cuts)(Conversation((question("one<|im_end|>three"), answer("two"))))
