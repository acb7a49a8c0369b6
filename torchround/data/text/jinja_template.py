"""Compiles and renders a chat template in a process of its own, whose memory and time are limited."""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import IO, Any

from torchround.data.errors import DataError, TokenizerError
from torchround.untrusted import template_process
from torchround.untrusted.template_process import LENGTH, OUT_OF_MEMORY

CPU_S = 4
"""Seconds of the processor for one rendering: 8 MiB of messages take at most 1.5. Load of the machine does not count."""
MEMORY_MIB = 450  # address space of the process; Python and Jinja take 30
MOST_BYTES = 8 << 20  # of a conversation as JSON: some two million tokens
MOST_WRITTEN = 4 * MOST_BYTES
SILENT_S = 120  # for a process that does not run at all: `CPU_S` ends one that does
MOST_FAILURES = 3  # in a row; packing may read one record twice

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

    def process() -> TemplateProcess:
        # A process that was forked from this one starts its own: two must not share the pipes.
        pid = os.getpid()
        return processes.get(pid) or processes.setdefault(pid, TemplateProcess(source, where))

    processes: dict[int, TemplateProcess] = {}
    process()
    return lambda variables: process().render(variables)


class TemplateLimitError(DataError):
    """An error of a template that passed a limit, which ended its process."""


class TemplateProcess:
    """A process that has compiled one template. It is started anew for the request after a limit, a few times.

    It ends with this object, and at the latest with the run, which holds the other ends of its pipes. Raises
    `TokenizerError` if it cannot start, or cannot compile the template.
    """

    def __init__(self, source: str, where: str) -> None:
        self._source, self._where = source, where
        self._lock = threading.Lock()
        self._failure, self._num_failures = "", 0
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
        if len(data) > MOST_BYTES:
            raise DataError(
                f"{len(data) >> 20} MiB of JSON for {self._where}; legal: up to {MOST_BYTES >> 20} MiB"
            )
        with self._lock:
            if not self._end.alive:
                if self._num_failures == MOST_FAILURES:
                    raise TemplateLimitError(self._failure)
                self._start()
            text = self._exchange(data)
            self._num_failures = 0
            return text

    def _start(self) -> None:
        try:
            process = subprocess.Popen(
                process_command(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is for the run, which still needs conversations for its last steps
            )
        except OSError as error:
            raise DataError(f"no process can be started for {self._where}: {error}") from error
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        os.set_blocking(process.stdin.fileno(), False)
        self._process, self._requests, self._replies = process, process.stdin, process.stdout
        self._end = weakref.finalize(self, _end, process, os.getpid())
        self._exchange(json.dumps(self._source).encode())

    def _exchange(self, data: bytes) -> str:
        """Send a request and return the text of the reply. Raises `DataError`. Without a reply, the process is ended."""
        try:
            rest = memoryview(LENGTH.pack(len(data)) + data)
            while rest:
                _wait(self._requests, select.POLLOUT)
                rest = rest[self._requests.write(rest) or 0 :]
            [size] = LENGTH.unpack(self._read(LENGTH.size))
            if size > MOST_WRITTEN:
                raise OSError(f"it writes more than {MOST_WRITTEN >> 20} MiB for one conversation")
            reply: dict[str, str] = json.loads(self._read(size))
        except BaseException as error:
            # Also after Ctrl-C: a reply that was not read would be taken for the next one.
            self._end()
            code = self._process.returncode
            reason = FAILURES.get(code) or f"its process ended: {str(error) or f'exit code {code}'}"
            self._failure = f"error in {self._where}: {reason}"
            if isinstance(error, (OSError, EOFError)):
                self._num_failures += 1
                raise TemplateLimitError(self._failure) from error
            raise
        if "error" in reply:
            raise DataError(f"error in {self._where}: {reply['error']}")
        return reply["text"]

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            _wait(self._replies, select.POLLIN)
            chunk = self._replies.read(size - len(found))
            if not chunk:
                raise EOFError
            found += chunk
        return bytes(found)


def process_command() -> list[str]:
    """List the words that start the process, with its limits."""
    limits = [str(CPU_S), str(MEMORY_MIB)]
    return [sys.executable, "-I", "-S", "-c", START, template_process.__file__, *limits, *sys.path]


def _wait(pipe: IO[bytes], event: int) -> None:
    poll = select.poll()
    poll.register(pipe, event)
    # Second by second: a job that was suspended for hours has waited for one of them.
    if not any(poll.poll(1000) for _ in range(SILENT_S)):
        raise TimeoutError(f"it has not run for {SILENT_S} s")


def _end(process: "subprocess.Popen[bytes]", pid: int) -> None:
    """End the process, and wait until it is gone. A process that was forked later leaves it alone."""
    if os.getpid() != pid:
        return
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    process.kill()
    process.wait()
