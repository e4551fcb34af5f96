"""Where the store of a run listens."""

from __future__ import annotations

import socket

import pytest

from slowfast_lara.engine import rendezvous as meeting
from slowfast_lara.engine.rendezvous import listen, open_store
from tests.engine.test_rendezvous import linux_only
from tests.helpers.runs import free_port


@linux_only
@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_the_store_listens_on_loopback_alone(host):
    port = free_port()
    kept = open_store(host, port, 10, keep=True)
    other = open_store(host, port, 10, keep=False)
    other.set("key", "value")
    assert kept.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)


@linux_only
def test_another_name_of_this_machine_is_reachable_from_elsewhere(monkeypatch):
    """Debian's /etc/hosts gives it a loopback address."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(meeting.socket, "getaddrinfo", lambda *_, **__: found)
    with listen("node1", 0) as server:
        assert server.getsockname()[0] in ("::", "0.0.0.0")


def test_an_address_that_is_translated_on_the_way():
    with listen("192.0.2.77", 0) as server:  # of the block for examples
        assert server.getsockname()[0] in ("::", "0.0.0.0")
