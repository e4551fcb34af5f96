"""The network interface of gloo and NCCL."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from slowfast_lara.engine.interfaces import choose_interface, interface_to
from tests.helpers.isolation import ip, linked_namespaces, why_no_network_namespaces
from tests.helpers.launchers import linux_only

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture()
def no_choice(monkeypatch):
    """Restore the variables afterwards, too."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@linux_only
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.1.1"])
def test_loopback(no_choice, host):
    assert choose_interface(host) == "lo"
    assert [os.environ[name] for name in VARIABLES] == ["lo", "=lo"]


@linux_only
def test_the_choice_of_the_user_stays(no_choice, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker0")
    choose_interface("localhost")
    assert [os.environ[name] for name in VARIABLES] == ["lo", "^docker0"]


def test_unknown_hosts_set_nothing(no_choice):
    assert choose_interface("no-such-host.invalid") == ""
    assert not any(name in os.environ for name in VARIABLES)


SCRIPT = """
import sys
from slowfast_lara.engine.interfaces import interface_to
print(",".join(interface_to(host) for host in sys.argv[1:]))
"""


@pytest.mark.slow
def test_the_interface_that_routes_to_the_host():
    """Two nodes: each uses its end of the link, for its own address and for that of the other."""
    if reason := why_no_network_namespaces():
        pytest.skip(reason)
    with linked_namespaces() as names:
        ip("-n", names[0], "route", "add", "default", "via", "10.213.77.2")
        for name in names:
            command = ["ip", "netns", "exec", name, sys.executable, "-c", SCRIPT]
            hosts = ["10.213.77.1", "10.213.77.2", "localhost"]
            out = subprocess.run([*command, *hosts], capture_output=True, text=True, check=True)
            assert out.stdout.strip() == f"{name},{name},lo"


def test_a_host_name_with_a_loopback_address(monkeypatch):
    """Debian maps the name of a node to 127.0.1.1: use the interface of the default route."""
    from slowfast_lara.engine import interfaces

    source = interfaces._source_address
    addresses = {"node0": "127.0.1.1"}
    monkeypatch.setattr(interfaces, "_source_address", lambda h: source(addresses.get(h, h)))
    default = source(interfaces._DOCUMENTATION)
    found = interface_to("node0")
    assert found != "lo" and (interfaces._address_of(found) == default or not default)
