"""Compiles and renders a chat template in a process of its own, whose memory and time are limited."""

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from torchround.data.document_types import DataError, TokenizerError
from torchround.untrusted import template_process
from torchround.untrusted.template_process import LENGTH, OUT_OF_MEMORY

CPU_S = 4
"""Seconds of the processor for one rendering: 8 MiB of messages take at most 1.5. Load of the machine does not count."""
MEMORY_MIB = 450  # address space of the process; Python and Jinja take 30
MOST_WRITTEN = 32 << 20  # bytes of a reply, which the run reads into its own memory

FAILURES = {  # by the process's exit code
    -signal.SIGPROF: f"it takes more than {CPU_S} s of the processor for one conversation, which is the limit",
    OUT_OF_MEMORY: f"it takes more than {MEMORY_MIB} MiB of memory for one conversation, which is the limit",
}

# -I and -S: neither the environment nor .pth files change what the process imports; the run's path comes last.
START = "import sys, runpy; sys.path += sys.argv[4:]; runpy.run_path(sys.argv[1])['main'](*sys.argv[2:4])"


def compile_template(source: str, where: str) -> Callable[[Mapping[str, Any]], str]:
    """Compile a chat template, and return the function that renders it with variables or raises `DataError`.

    `where` names the template in messages. Raises `TokenizerError` if the source is not Jinja or exceeds the limits.
    """
    return TemplateProcess(source, where).render


class TemplateProcess:
    """A process that has compiled one template. After a limit has ended it, the next request starts another one.

    It ends with this object, and at the latest with the run, which holds the other ends of its pipes. Raises
    `TokenizerError` if it cannot start, or cannot compile the template.
    """

    def __init__(self, source: str, where: str) -> None:
        self._source, self._where = source, where
        self._lock = threading.Lock()
        try:
            self._start()
        except DataError as error:
            raise TokenizerError(str(error)) from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """Write a conversation. Raises `DataError` if the template fails or exceeds its limits."""
        try:
            data = json.dumps(variables, default=str).encode()  # as text, a date prints as in Jinja
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(f"it cannot be written as JSON: {error}") from error
        with self._lock:
            if not self._end.alive:
                self._start()
            return self._exchange(data)

    def _start(self) -> None:
        try:
            process = subprocess.Popen(
                process_command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the run, which still needs conversations for its last steps
            )
        except OSError as error:
            raise DataError(f"no process can be started for {self._where}: {error}") from error
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        self._process, self._requests, self._replies = process, process.stdin, process.stdout
        self._end = weakref.finalize(self, _end, process)
        self._exchange(json.dumps(self._source).encode())

    def _exchange(self, data: bytes) -> str:
        """Send a request and return the text of the reply. Raises `DataError`. Without a reply, the process is ended."""
        try:
            self._requests.write(LENGTH.pack(len(data)) + data)
            self._requests.flush()
            size = int.from_bytes(self._replies.read(LENGTH.size), "little")
            if size > MOST_WRITTEN:
                raise OSError(f"it writes more than {MOST_WRITTEN >> 20} MiB for one conversation")
            content = self._replies.read(size)
            if not content or len(content) < size:
                raise EOFError
            reply: dict[str, str] = json.loads(content)
        except BaseException as error:
            # Also after Ctrl-C: a reply that was not read would be taken for the next one.
            self._end()
            code = self._process.returncode
            reason = FAILURES.get(code) or f"its process ended: {str(error) or f'exit code {code}'}"
            if isinstance(error, (OSError, EOFError)):
                raise DataError(f"error in {self._where}: {reason}") from error
            raise
        if "error" in reply:
            raise DataError(f"error in {self._where}: {reply['error']}")
        return reply["text"]


def process_command() -> list[str]:
    limits = [str(CPU_S), str(MEMORY_MIB)]
    return [sys.executable, "-I", "-S", "-c", START, template_process.__file__, *limits, *sys.path]


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(OSError):  # what is still to be written has no reader any more
                pipe.close()
