"""Small shared memory and cut network links, in Linux namespaces."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

_SMALL_SHM = 'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$@"'
_numbers = itertools.count()


def small_shm(size: str) -> tuple[str, ...]:
    """Return a command prefix that limits the shared memory to `size`."""
    return ("unshare", "--mount", "sh", "-c", _SMALL_SHM.format(size=size), "sh")


def can_limit_shm() -> bool:
    if not shutil.which("unshare"):
        return False
    return not subprocess.run([*small_shm("1m"), "true"], capture_output=True).returncode


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def why_no_network_namespaces() -> str:
    """Return the reason why this machine cannot create network namespaces, or ""."""
    if not sys.platform.startswith("linux") or not shutil.which("ip"):
        return "needs Linux and iproute2"
    name = f"lara-probe-{os.getpid()}"
    try:
        ip("netns", "add", name)
        ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"cannot create network namespaces: {error.stderr.strip()}"
    return ""


@contextlib.contextmanager
def linked_namespaces() -> Iterator[list[str]]:
    """Create two network namespaces with one link; yield their names, also of the devices."""
    number = next(_numbers)
    names = [f"lara{os.getpid()}{side}{number}" for side in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        peer = ("peer", "name", names[1], "netns", names[1])
        ip("link", "add", names[0], "netns", names[0], "type", "veth", *peer)
        for address, name in enumerate(names, start=1):
            ip("-n", name, "addr", "add", f"10.213.77.{address}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
