"""Renders a chat template, as a program of its own that `turns.py` starts.

A template is a program of a stranger. Jinja's sandbox keeps it from files and private attributes, and the system's limits
on this process keep it from the memory and the time of the run. It imports Jinja and the standard library alone.

Requests come through standard input and replies leave through standard output: JSON, after its length in four bytes.
"""

import datetime
import json
import os
import resource
import signal
import struct
import sys
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

LENGTH = struct.Struct("<I")
OUT_OF_MEMORY = 12  # exit code
# `strftime_now` always gives this day, so that a run resumed tomorrow reads the same text as today. Llama 3.1's
# template falls back to it.
FIXED_DAY = datetime.datetime(2024, 7, 26)


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks assistants' turns for other trainers and changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 (a plain attribute of the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def sandbox() -> ImmutableSandboxedEnvironment:
    """Build the sandbox, with the functions and filters that released templates use."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    # A random text would differ after a resume.
    del environment.filters["random"], environment.globals["lipsum"]
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=raise_exception, strftime_now=FIXED_DAY.strftime)
    return environment


def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **further: Any) -> str:
    """Write JSON for a model to read: no HTML escapes, and letters of all scripts unescaped."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **further)


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def serve(cpu_s: float) -> None:
    """Compile the template of the first request, and render it with the variables of each further one.

    Each request has `cpu_s` seconds of the processor. The kernel ends the process after them, also in the middle of a
    long operation, because signals have their default action here.
    """
    environment, template = sandbox(), None
    while size := sys.stdin.buffer.read(LENGTH.size):
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        reply: dict[str, str] = {}
        try:
            request = json.loads(sys.stdin.buffer.read(*LENGTH.unpack(size)))
            if template is None:
                template, reply["text"] = environment.from_string(request), ""
            else:
                reply["text"] = template.render(request)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 (a template can raise every Python error)
            reply["error"] = f"{type(error).__name__}: {error}"
        data = json.dumps(reply).encode()
        sys.stdout.buffer.write(LENGTH.pack(len(data)) + data)
        sys.stdout.buffer.flush()


def main(cpu_s: str, memory_mib: str) -> None:
    """Limit the process, and serve until the run closes the pipe."""
    # A scheduler may send these to all processes of a job: the run still saves a checkpoint, and needs this one for it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    most_bytes, hard = int(memory_mib) << 20, resource.getrlimit(resource.RLIMIT_AS)[1]
    # The hard limit that the run was given is minus one if there is none.
    resource.setrlimit(resource.RLIMIT_AS, (min(most_bytes, hard % 2**63), hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        serve(float(cpu_s))
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
