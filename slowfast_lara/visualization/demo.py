"""Serving the demo: on this machine alone, sending nothing, leaving nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from slowfast_lara.errors import InputError
from slowfast_lara.inference.model import TrainedModel
from slowfast_lara.lazy import check_installed

# What the page may load: its own parts. Nothing that Gradio might name elsewhere is asked for.
_POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; object-src 'none'; "
    "base-uri 'self'; form-action 'self'"
)
_HEADERS = {"Content-Security-Policy": _POLICY, "Referrer-Policy": "no-referrer"}
Message = MutableMapping[str, Any]


class NothingFromElsewhere:
    """ASGI middleware that puts `_HEADERS` on every answer."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), text.encode()) for name, text in _HEADERS.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        await self._app(scope, receive, send_with_headers)


@contextlib.contextmanager
def _own_folder() -> Iterator[None]:
    """Gradio, and what is dropped on the page, leave their files in a folder that goes."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="slowfast_lara_demo_") as folder:
        # Gradio takes these when it is imported.
        os.environ.update(
            GRADIO_TEMP_DIR=folder,
            GRADIO_ANALYTICS_ENABLED="False",
            HF_HUB_OFFLINE="1",
            no_proxy="*",  # it asks the page once, which no proxy can reach
        )
        tempfile.tempdir = folder
        try:
            yield
        finally:
            tempfile.tempdir = before


def _check_address(host: str, port: int) -> None:
    """Of an address that is not this machine's, or in use, Gradio would say several lines."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{host}:{port} cannot be served: {reason}") from None


def serve(
    model: TrainedModel,
    *,
    host: str,
    port: int,
    views: int | None,
    most_megabytes: int,
    most_minutes: float,
) -> None:
    """Serve the page until a signal ends it."""
    _check_address(host, port)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    with _own_folder():
        check_installed("gradio", "demo")
        from starlette.middleware import Middleware

        from slowfast_lara.visualization.demo_page import MOST_PAGES, Page, build

        blocks = build(Page(model, views, 60 * most_minutes))
        try:
            _, address, _ = blocks.launch(
                server_name=host,
                server_port=port,
                share=False,
                prevent_thread_lock=True,
                quiet=True,
                footer_links=[],
                run_history=False,
                enable_monitoring=False,
                ssr_mode=False,
                pwa=False,
                mcp_server=False,
                max_file_size=most_megabytes * 10**6,
                state_session_capacity=MOST_PAGES,
                app_kwargs={"middleware": [Middleware(NothingFromElsewhere)]},
            )
            print(f"{address} is the page; Ctrl-C ends it", flush=True)
            threading.Event().wait()
        except KeyboardInterrupt:
            return
        except (OSError, ValueError) as error:
            raise InputError(f"{host}:{port} cannot be served: {error}") from None
        finally:
            # A second signal must not end the tidying up.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            blocks.close(verbose=False)
