"""The sandbox stops templates that do too much, and changes nothing for the others."""

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from torchround.data.errors import DataError
from torchround.data.text.jinja_template import compile_template

HARMLESS = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{% if loop.last %}!{% endif %}{{ m.a ~ '-' ~ 1 }}{% endfor %}",
    "{% for k, v in messages[0].items() if v != 2 %}{{ k }}{% else %}none{% endfor %}",
    "{% macro f(x, y=2) %}{{ x * y }}{{ caller() }}{% endmacro %}{% call f('ab') %}c{% endcall %}",
    "{{ messages|map(attribute='a')|join(', ') }} {{ 'abc'.replace('b', 'xx')|upper|center(9) }}",
    "{% set n = namespace(i=0) %}{% for x in range(5) %}{% set n.i = n.i + x %}{% endfor %}{{ n.i ** 2 % 7 }}",
    "{{ '%05.1f|%s' % (2.5, 'x') }} {{ [1, 2] * 2 + [3] }} {{ 'é'.ljust(3) }}|{{ messages|length }}",
    "{% for x in messages|selectattr('a') recursive %}{{ x.a }}{% endfor %}",
]


@pytest.mark.parametrize("source", HARMLESS)
def test_a_harmless_template_renders_as_in_jinja_s_own_sandbox(source: str) -> None:
    messages = [{"a": 1, "b": 2}, {"a": 3}]
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    assert compile_template(source, {})(messages, None) == plain.render(messages=messages)


def test_the_work_of_one_rendering_is_not_charged_to_the_next() -> None:
    render = compile_template(
        "{% for i in range(90000) %}{% for j in range(10) %}{% endfor %}{% endfor %}", {}
    )
    for _ in range(4):
        assert render([], None) == ""


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ '%999999999d' % 1 }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
        "{% set n = namespace(t='a') %}{% for i in range(40) %}{% set n.t = n.t ~ n.t %}{% endfor %}",
    ],
)
def test_a_template_beyond_the_limits_is_stopped_with_the_reason(source: str) -> None:
    with pytest.raises(DataError, match="TemplateLimitError: (more than|a text, list or number larger)"):
        compile_template(source, {})([], None)
