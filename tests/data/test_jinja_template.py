"""A chat template is rendered in Jinja's sandbox: the same text every day, no objects of Python, and errors of its own."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.batch_contents import TEMPLATE
from torchround.data import DataError, TokenizerError
from torchround.data.text.turns import TurnTemplate

MESSAGES = [{"a": 1, "b": 2}, {"a": 3}]


@pytest.fixture
def render(tokenizer):
    """Render messages by a template that writes a plain conversation too, as each template must."""

    def rendered(source, messages):
        plain = "{% if messages[0].role %}" + TEMPLATE + "{% else %}" + source + "{% endif %}"
        return TurnTemplate(plain, tokenizer, "chat template t").render(messages)

    return rendered


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


def test_lines_of_blocks_leave_no_line_ends_and_no_indentation(render):
    source = "{% for m in messages %}\n  {% if m.a %}\n{{ m.a }}\n  {% endif %}\n{% endfor %}"
    assert render(source, MESSAGES) == "1\n3\n"


def test_dates_print_as_text_and_the_day_is_always_the_same(render):
    assert render("{{ strftime_now('%d %B %Y') }}", MESSAGES) == "26 July 2024"


def test_threads_get_their_own_texts(tokenizer):
    template = TurnTemplate(TEMPLATE, tokenizer, "t")

    def is_right(name):
        turns = [[{"role": "user", "content": f"{name}{n}" * 100}] for n in range(50)]
        return all(template.render(turn) == f"<|bos|>user:{turn[0]['content']}<|eos|>" for turn in turns)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_right, "abcd"))
