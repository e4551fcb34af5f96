"""Web server of the demo page. It contacts no other server and leaves no files behind."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Collection, Iterator

from slowfast_lara.errors import InputError
from slowfast_lara.inference.model import TrainedModel
from slowfast_lara.lazy import check_installed


@contextlib.contextmanager
def _temporary_folder() -> Iterator[str]:
    """Store uploads and Gradio's files in a temporary folder, which is removed at exit."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix="slowfast_lara_demo_") as folder:
        # Gradio reads these environment variables when it is imported.
        os.environ.update(
            GRADIO_TEMP_DIR=folder,
            GRADIO_ANALYTICS_ENABLED="False",
            HF_HUB_OFFLINE="1",
            # Gradio requests its own page at start; a proxy could not reach this server.
            no_proxy="*",
        )
        tempfile.tempdir = folder
        try:
            yield folder
        finally:
            tempfile.tempdir = before


def _check_address(host: str, port: int) -> None:
    """Raise an InputError if the server cannot listen at the address, e.g. if it is in use."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot listen on {host}:{port}: {reason}") from None


def serve(
    model: TrainedModel,
    *,
    host: str,
    port: int,
    names: Collection[str],
    views: int | None,
    max_megabytes: int,
    max_minutes: float,
) -> None:
    """Serve the demo page until SIGINT or SIGTERM.

    Args:
        names: further values of the Host header to accept, besides `host` and this machine's names.
        views: number of views per prediction; None: as in the model's config.
        max_megabytes: maximum size of an uploaded video.
        max_minutes: maximum duration of an uploaded video.
    """
    _check_address(host, port)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _temporary_folder() as folder:
        check_installed("gradio", "demo")
        # Imported here: Gradio is optional and reads the environment variables at import.
        from starlette.middleware import Middleware

        from slowfast_lara.visualization.demo_page import MAX_SESSIONS, DemoPage, build
        from slowfast_lara.visualization.demo_requests import AllowedHosts, RequestChecks
        from slowfast_lara.visualization.demo_uploads import Uploads

        uploads = Uploads(os.path.join(folder, "uploads"), max_megabytes * 10**6)
        blocks = build(DemoPage(model, uploads, views, 60 * max_minutes))
        checks = Middleware(RequestChecks, AllowedHosts(host, names), uploads)
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
                state_session_capacity=MAX_SESSIONS,
                app_kwargs={"middleware": [checks]},
            )
            print(f"Serving the demo at {address} (Ctrl-C to stop)", flush=True)
            threading.Event().wait()
        except KeyboardInterrupt:
            return
        except (OSError, ValueError) as error:
            raise InputError(f"cannot listen on {host}:{port}: {error}") from None
        finally:
            # A second signal must not interrupt the clean-up.
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_IGN)
            blocks.close(verbose=False)
