"""A chat template is rendered in a process of its own, which ends if the template does too much, and with the run."""

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.support.batch_contents import TEMPLATE, documents, loader_of, write_lines
from tests.support.processes import is_running
from torchround.config import TokenizerTable
from torchround.data import DataError, build_tokenizer
from torchround.data.text import turns
from torchround.data.text.turns import TemplateProcess
from torchround.untrusted.template_process import OUT_OF_MEMORY

HARMLESS = [
    "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{% if loop.last %}!{% endif %}{{ m.a ~ '-' ~ 1 }}{% endfor %}",
    "{% for k, v in messages[0].items() if v != 2 %}{{ k }}{% else %}none{% endfor %}{{ messages }}",
    "{{ messages|map(attribute='a')|join(', ') }} {{ 'abc'.replace('b', 'xx')|upper|center(9) }} \ud800",
    "{% for x in messages|selectattr('a') recursive %}{{ x.a }}{% endfor %}{{ tools }}",
]
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}TEXT{% endfor %}{% endfor %}"
GROWTH = "{% set n = namespace(t=BEGIN) %}{% for i in range(60) %}{% set n.t = n.t OPERATOR n.t %}{% endfor %}"
HOSTILE = {
    "a text": "{{ 'a' * 10**10 }}",
    "a list": "{{ [1] * 10**9 }}",
    "a tuple": "{{ ((1,) * 10**9)|length }}",
    "a width": "{{ '%999999999d' % 1 }}",
    "a width as a value": "{{ '%*d' % (10**9, 1) }}",
    "a nested width": "{{ '{:{}}'.format(1, 10**9) }}",
    "a width of zeros": "{{ '1'.zfill(10**9) }}",
    "a format as a filter": "{{ '%s%s'|format('a' * 10**8, 'a' * 10**9) }}",
    "a join of lists": "{{ (['a' * 10**6] * 10**6)|join }}",
    "a join by a text": "{{ ('x' * 10**6).join(['a'] * 10**6) }}",
    "translate": "{{ ('a' * 10**6).translate({97: 'b' * 10**6}) }}",
    "replace": "{{ ('a' * 10**6)|replace('a', 'b' * 10**6) }}",
    "doubling by ~": GROWTH.replace("BEGIN", "'a'").replace("OPERATOR", "~"),
    "doubling by +": GROWTH.replace("BEGIN", "'a'").replace("OPERATOR", "+"),
    "doubling of tuples": GROWTH.replace("BEGIN", "(1, 2)").replace("OPERATOR", "+"),
    "squares": GROWTH.replace("BEGIN", "9").replace("OPERATOR", "*"),
    "a power": "{{ (10**8) ** (10**8) }}",
    "loops": LOOPS.replace("TEXT", ""),
    "loops that write": LOOPS.replace("TEXT", "a" * 99),
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "sort": "{{ (range(99999)|list * 10**3)|sort|length }}",
    "unique": "{{ (range(99999)|list * 10**3)|unique|list|length }}",
    "groups": "{{ ([{'a': 1}] * 10**8)|groupby('a')|length }}",
    "map": "{{ ([1] * 10**9)|map('string')|join|length }}",
    "a batch": "{{ [1]|batch(10**9, 'x')|list|length }}",
    "slices": "{{ [1]|slice(10**9)|list|length }}",
    "a sum of lists": "{{ ([[1] * 1000] * 10**5)|sum(start=[])|length }}",
    "an indent": "{{ messages|tojson(indent=10**9) }}",
    "addresses": "{{ ('http://a.b ' * 10**7)|urlize|length }}",
    "a wide source": "{{ (" + "1," * 10**7 + ") }}",
    "a deep source": "{{ " + "(" * 50_000,
}
MESSAGES = [{"a": 1, "b": 2}, {"a": 3}]


@pytest.mark.parametrize("source", HARMLESS)
def test_a_harmless_template_renders_as_in_jinja_s_own_sandbox(source):
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
    assert TemplateProcess(source, "t").render({"messages": MESSAGES}) == plain.render(messages=MESSAGES)


QUICK = ["a text", "a nested width", "doubling by ~", "loops", "macros", "groups", "a deep source"]


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.nightly) for n in HOSTILE])
def test_a_template_that_needs_too_much_is_one_message(monkeypatch, name):
    monkeypatch.setattr(turns, "CPU_S", 0.2)
    with pytest.raises(DataError, match=r"error in chat template t: (it takes more than|RecursionError)"):
        TemplateProcess(HOSTILE[name], "chat template t").render({"messages": MESSAGES})


def test_the_limit_of_time_holds_if_the_run_blocks_its_signal(monkeypatch):
    """A process is born with the signals blocked that its parent has blocked."""
    monkeypatch.setattr(turns, "CPU_S", 0.2)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])
    try:
        with pytest.raises(DataError, match="it takes more than"):
            TemplateProcess(HOSTILE["loops"], "t").render({"messages": MESSAGES})
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# The memory of a process counts with that of the one that started it, so this one imports nothing large.
MEASURED = """
import json, resource, struct, subprocess, sys
command, sources = json.load(sys.stdin)
length = struct.Struct("<I")
for source in sources:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    requests = [json.dumps(request).encode() for request in (source, {})]
    process.communicate(b"".join(length.pack(len(request)) + request for request in requests))
    print(process.returncode)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


@pytest.mark.nightly
def test_no_template_takes_500_mb():
    ended = subprocess.run(
        [sys.executable, "-c", MEASURED],
        input=json.dumps((turns.process_command(), list(HOSTILE.values()))),
        capture_output=True,
        check=True,
        text=True,
    )
    *codes, most_bytes = map(int, ended.stdout.split())
    # A source that is nested too deeply is an error of Jinja's, after which the process goes on.
    ends = {name: code for name, code in zip(HOSTILE, codes, strict=True) if name != "a deep source"}
    assert {*ends.values()} == {OUT_OF_MEMORY, -signal.SIGPROF}, ends
    assert 100 * 10**6 < most_bytes < 500 * 10**6


def test_a_template_works_again_after_a_limit_has_ended_its_process():
    render = TemplateProcess("{% if messages %}{{ 'a' * 10**10 }}{% endif %}fine", "t").render
    for _ in range(2):
        assert render({"messages": []}) == "fine"
        with pytest.raises(DataError, match="450 MiB of memory"):
            render({"messages": MESSAGES})


def test_large_conversations_and_letters_of_several_bytes_are_written():
    assert TemplateProcess("{{ messages[0] }}", "t").render({"messages": ["é" * 10**6]}) == "é" * 10**6


def test_a_limit_met_in_the_middle_of_the_data_names_record_and_template_and_leaves_a_position(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{% if 'bomb' in messages[0].content %}{{ 'a' * 10**10 }}{% endif %}" + TEMPLATE)
    names = ["good"] * 40 + ["bomb"] + ["good"] * 20
    turns = [[{"role": "user", "content": n}, {"role": "assistant", "content": "a"}] for n in names]
    write_lines(tmp_path / "x.jsonl", [{"messages": turn} for turn in turns])
    tokenizer = build_tokenizer(TokenizerTable(name="bytes", chat_template=str(template)))
    make = partial(loader_of, tmp_path / "x.jsonl", tokenizer, 64, 1, content="messages", epochs=1, shuffle=False)
    loader = make()
    with pytest.raises(DataError, match="line 41: error in chat template .*template.jinja: .* memory"):
        list(loader)
    assert json.dumps(loader.state_dict())
    assert len(documents(make(on_bad_record="skip"), tokenizer)) == 60


# The process.


def test_threads_get_their_own_replies():
    render = TemplateProcess("{{ messages[0] * 1000 }}", "t").render

    def is_right(name):
        return all(render({"messages": [f"{name}{n}"]}) == f"{name}{n}" * 1000 for n in range(50))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(is_right, "abcd"))


def render_and_end():
    """Send signals to the process of a template, use it, and die."""
    os.set_inheritable(os.open("/dev/null", os.O_RDONLY), True)
    render = TemplateProcess("{{ messages }}", "t").render
    [child] = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(int(child), number)
    print(render({"messages": "x"}), child, *sorted(os.listdir(f"/proc/{child}/fd")), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_process_outlives_signals_to_the_job_holds_no_other_file_and_ends_with_a_killed_run(processes, tmp_path):
    ended = processes.run("tests.data.test_jinja_template:render_and_end", folder=tmp_path)
    text, child, *files = ended.text().split()
    assert (text, files, ended.returncode) == ("x", ["0", "1", "2"], -signal.SIGKILL)
    while is_running(child):
        time.sleep(0.01)


def test_a_forked_process_leaves_the_template_of_its_parent_alone(monkeypatch):
    template = TemplateProcess("{{ messages }}", "x")
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: -1)
        template._end()
    try:
        assert is_running(template._process.pid)
    finally:
        turns._end(template._process, os.getpid())
