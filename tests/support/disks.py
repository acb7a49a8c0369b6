"""A disk of one process that runs full or becomes read-only, as real as the machine allows.

Where the process may mount, the disk is a small tmpfs in a namespace of its own, and full means ENOSPC. Elsewhere
the kernel's limit on file sizes fails writes as a quota does, and folders lose their write permission.
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
from functools import partial
from pathlib import Path

DISK_BYTES = 4 << 20
LEFT_BYTES = 64 << 10  # less than a checkpoint needs

_CLONE_NEWNS, _CLONE_NEWUSER = 0x20000, 0x10000000
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
_MNT_DETACH = 2


class Disk:
    """The disk under `folder`, whose troubles affect only this process. `readable` is where checkpoints can be read."""

    def __init__(self, folder, checkpoints):
        self.folder = folder
        self.checkpoints = self.readable = checkpoints
        folder.mkdir()
        self._mounts = _may_mount() and _mount("tmpfs", folder, "tmpfs", 0, f"size={DISK_BYTES}")
        self.kind = "a tmpfs" if self._mounts else "limited by the kernel"
        self.troubles = {"full": self.fill, "filling": self.fill_during_the_next_save, "read-only": self.make_read_only}
        self._endings = []
        self._armed = False

    def fill(self):
        if self._mounts:
            self._fill_to(0)
        else:
            self._limit()

    def fill_during_the_next_save(self):
        self._armed = True
        sys.addaudithook(self._when_opened)

    def make_read_only(self):
        if self._mounts:
            _mount(self.checkpoints, self.checkpoints, None, _MS_BIND, None)
            _mount(None, self.checkpoints, None, _MS_BIND | _MS_REMOUNT | _MS_RDONLY, None)
            self._endings.append(lambda: _umount(self.checkpoints))
        elif os.geteuid() != 0:
            self.checkpoints.chmod(0o555)
            self._endings.append(lambda: self.checkpoints.chmod(0o755))
        else:  # root ignores file modes, but cannot write into a folder that is a file
            self.readable = self.checkpoints.rename(self.checkpoints.with_name("aside"))
            self.checkpoints.touch()
            self._endings += [partial(os.rename, self.readable, self.checkpoints), self.checkpoints.unlink]

    def end_trouble(self):
        self._armed = False
        while self._endings:
            self._endings.pop()()

    def _when_opened(self, event, details):
        if self._armed and event == "open" and ".tmp/tensors" in str(details[0]):
            self._armed = False
            if self._mounts:
                self._fill_to(LEFT_BYTES)
            else:
                self._limit()

    def _fill_to(self, left_bytes):
        ballast = self.folder / "ballast"
        free = os.statvfs(self.folder)
        with open(ballast, "wb") as file:
            file.write(bytes(free.f_bavail * free.f_frsize - left_bytes))
        self._endings.append(ballast.unlink)

    def _limit(self):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LEFT_BYTES, hard))
        self._endings.append(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard)))


def _may_mount():
    """Enter a mount namespace of this process alone, if necessary in a user namespace in which it is root."""
    libc, uid, gid = ctypes.CDLL(None, use_errno=True), os.geteuid(), os.getegid()
    if libc.unshare(_CLONE_NEWNS) != 0:
        if libc.unshare(_CLONE_NEWNS | _CLONE_NEWUSER) != 0:
            return False
        for name, content in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
            try:
                Path(f"/proc/self/{name}").write_text(content)
            except OSError:
                return False
    return _mount(None, Path("/"), None, _MS_REC | _MS_PRIVATE, None)


def _mount(source, target, kind, flags, options):
    arguments = [None if part is None else str(part).encode() for part in (source, target, kind, options)]
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.mount(*arguments[:3], ctypes.c_ulong(flags), arguments[3]) == 0


def _umount(target):
    assert ctypes.CDLL(None, use_errno=True).umount2(str(target).encode(), _MNT_DETACH) == 0, "umount failed"


@contextlib.contextmanager
def files_limited_to(limit_bytes):
    """Limit the files this process writes to `limit_bytes`; longer writes raise `OSError`, as a quota does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
