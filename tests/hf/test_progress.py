"""The bar of an import: shown on a terminal, and nothing at all in a log file."""

import os
import pty
import re
import sys
import threading

from torchround.engine.store.host_store import HostStore
from torchround.hf import PretrainedWeights


def read_release(release):
    model = release.family.build(release.config)
    names = release.family.hf_names(release.config)
    weights = PretrainedWeights(release.folder, names, model.stored_shapes())
    HostStore(model).initialize(model, 0, weights.load)
    return weights


def shown_on(files, run, monkeypatch):
    """Return what `run` writes to standard error. The program writes to the second end of the given pair."""
    ours, theirs = files
    received = []

    def receive():
        try:
            while piece := os.read(ours, 4096):
                received.append(piece)
        except OSError:  # how a terminal ends
            pass

    reader = threading.Thread(target=receive)
    reader.start()
    with monkeypatch.context() as patch, open(theirs, "w") as stderr:
        patch.setattr(sys, "stderr", stderr)
        run()
    reader.join()
    os.close(ours)
    return b"".join(received).decode()


def test_a_terminal_shows_how_much_is_read_up_to_all_of_it(releases, monkeypatch):
    release = releases("qwen3 moe")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    weights = []
    shown = shown_on(pty.openpty(), lambda: weights.append(read_release(release)), monkeypatch)
    assert f"reading {release.folder}" in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)
    size = f"{weights[0].bytes_of(weights[0].names) / 1024:.1f}"
    assert f"{size}/{size} KiB" in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", shown)


def test_a_log_file_gets_nothing_of_it(releases, monkeypatch):
    release = releases("qwen3 moe")
    assert shown_on(os.pipe(), lambda: read_release(release), monkeypatch) == ""
