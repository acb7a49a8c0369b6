"""A chat template is rendered in Jinja's sandbox: the same text every day, no objects of Python, and errors of its own."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.support.batch_contents import TEMPLATE, documents, loader_of, write_lines
from torchround.config import TokenizerTable
from torchround.data import DataError, TokenizerError, build_tokenizer
from torchround.data.text.turns import TurnTemplate

HARMLESS = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{% if loop.last %}!{% endif %}{{ m.a ~ '-' ~ 1 }}{% endfor %}",
    "{% for k, v in messages[0].items() if v != 2 %}{{ k }}{% else %}none{% endfor %}{{ messages }}",
    "{{ messages|map(attribute='a')|join(', ') }} {{ 'abc'.replace('b', 'xx')|upper|center(9) }} \ud800",
    "{% for x in messages|selectattr('a') recursive %}{{ x.a }}{% endfor %}{{ tools }}",
]
MESSAGES = [{"a": 1, "b": 2}, {"a": 3}]


@pytest.fixture
def render(tokenizer):
    """Render messages by a template that writes a plain conversation too, as each template must."""

    def rendered(source, messages):
        plain = "{% if messages[0].role %}" + TEMPLATE + "{% else %}" + source + "{% endif %}"
        return TurnTemplate(plain, tokenizer, "chat template t").render(messages)

    return rendered


@pytest.mark.parametrize("source", HARMLESS)
def test_a_harmless_template_renders_as_in_jinja_s_own_sandbox(render, source):
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    assert render(source, MESSAGES) == plain.render(messages=MESSAGES, tools=None)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].__class__.__mro__ }}", "SecurityError"),
        ("{{ raise_exception.__globals__.x }}", "SecurityError"),
        ("{% include 'secret' %}", "TypeError: no loader"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ 1 | random }}", "No filter named 'random'"),
    ],
)
def test_a_template_reaches_no_object_of_python_and_its_errors_name_it(render, source, message):
    with pytest.raises((DataError, TokenizerError), match=f"error in chat template t: .*{message}"):
        render(source, MESSAGES)


def test_dates_print_as_text_and_the_day_is_always_the_same(render):
    assert render("{{ strftime_now('%d %B %Y') }}", MESSAGES) == "26 July 2024"


def test_threads_get_their_own_texts(tokenizer):
    template = TurnTemplate(TEMPLATE, tokenizer, "t")

    def is_right(name):
        turns = [[{"role": "user", "content": f"{name}{n}" * 100}] for n in range(50)]
        return all(template.render(turn) == f"<|bos|>user:{turn[0]['content']}<|eos|>" for turn in turns)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_right, "abcd"))


def test_an_error_in_the_middle_of_the_data_names_record_and_template_and_leaves_a_position(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% if 'bomb' in messages[0].content %}{{ raise_exception('no bombs') }}{% endif %}" + TEMPLATE)
    names = ["good"] * 40 + ["bomb"] + ["good"] * 20
    turns = [[{"role": "user", "content": n}, {"role": "assistant", "content": "a"}] for n in names]
    write_lines(tmp_path / "x.jsonl", [{"messages": turn} for turn in turns])
    tokenizer = build_tokenizer(TokenizerTable(name="bytes", chat_template=str(template)))
    make = partial(loader_of, tmp_path / "x.jsonl", tokenizer, 64, 1, content="messages", epochs=1, shuffle=False)
    loader = make()
    with pytest.raises(DataError, match="line 41: error in chat template .*template.jinja: .* no bombs"):
        list(loader)
    assert json.dumps(loader.state_dict())
    assert len(documents(make(on_bad_record="skip"), tokenizer)) == 60
