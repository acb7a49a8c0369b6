"""Two network namespaces joined by a link: two hosts, as far as the network is concerned.

It takes the rights to make namespaces, and the program `ip` of iproute2.
"""

import ctypes
import os
import shutil
import subprocess
from contextlib import contextmanager, suppress

import pytest

ADDRESSES = ("10.231.77.1", "10.231.77.2")


class Networks:
    def __init__(self):
        self.names = tuple(f"torchround-{os.getpid()}-{side}" for side in "ab")
        ends = [f"tr{os.getpid()}{side}" for side in "ab"]  # at most 15 characters
        self._ends = ends
        for name in self.names:
            run("ip", "netns", "add", name)
        run("ip", "-n", self.names[0], "link", "add", ends[0], "type", "veth", "peer", ends[1], "netns", self.names[1])
        for name, end, address in zip(self.names, ends, ADDRESSES, strict=True):
            run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", end)
            for device in ("lo", end):
                run("ip", "-n", name, "link", "set", device, "up")

    def cut(self):
        """Cut the link. Addresses stay, and no connection is told: packets are lost, as behind a broken switch."""
        run("ip", "-n", self.names[0], "link", "set", self._ends[0], "down")

    def remove(self):
        for name in self.names:
            with suppress(subprocess.CalledProcessError):
                run("ip", "netns", "del", name)


def run(*command):
    subprocess.run(command, check=True, capture_output=True, text=True)


@contextmanager
def joined_networks():
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root, and the program ip")
    try:
        networks = Networks()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this computer allows no network namespaces: {' '.join(error.cmd)}: {error.stderr.strip()}")
    try:
        yield networks
    finally:
        networks.remove()


def enter(name):
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as namespace:
        if libc.setns(namespace.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {name}")
