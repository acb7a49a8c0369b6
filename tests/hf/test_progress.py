"""The bar of an import: shown on a terminal, and nothing at all in a log file."""

import contextlib
import os
import pty
import re
import threading

import pytest

from torchround.engine.store.host_store import HostStore
from torchround.hf import PretrainedWeights


@pytest.mark.parametrize("files", [pty.openpty, os.pipe], ids=["terminal", "log file"])
def test_a_terminal_shows_how_much_is_read_up_to_all_of_it_and_a_log_file_nothing(releases, monkeypatch, files):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    release, received = releases("qwen3 moe"), []
    model, names = release.family.build(release.config), release.family.hf_names(release.config)
    weights = PretrainedWeights(release.folder, names, model.stored_shapes())
    ours, theirs = files()

    def receive():
        with contextlib.suppress(OSError):  # how a terminal ends
            while piece := os.read(ours, 4096):
                received.append(piece)

    reader = threading.Thread(target=receive)
    reader.start()
    with open(theirs, "w") as stderr, contextlib.redirect_stderr(stderr):
        HostStore(model).initialize(model, 0, weights.load)
    reader.join()
    os.close(ours)
    shown = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", b"".join(received).decode())
    size = f"{weights.bytes_of(weights.names) / 1024:.1f}"
    if files is os.pipe:
        assert shown == ""
    else:
        assert f"reading {release.folder}" in shown and f"{size}/{size} KiB" in shown
