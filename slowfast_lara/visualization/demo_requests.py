"""ASGI middleware of the demo: request checks, uploads and security headers."""

from __future__ import annotations

import ipaddress
import json
import socket
from collections.abc import Awaitable, Callable, Collection, Iterator, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.responses import JSONResponse, PlainTextResponse, Response

from slowfast_lara.visualization.demo_uploads import RequestError, Uploads

# This policy makes the browser load resources only from this server, although Gradio's page
# links to other servers.
_POLICY = (
    "default-src 'self' 'unsafe-inline' 'unsafe-eval' data: blob:; object-src 'none'; "
    "base-uri 'self'; form-action 'self'"
)
_HEADERS = [(b"content-security-policy", _POLICY.encode()), (b"referrer-policy", b"no-referrer")]
# Maximum body size of a request that is not an upload, e.g. of a click or a slider position.
_MAX_BODY_BYTES = 1_000_000
Message = MutableMapping[str, Any]


class AllowedHosts:
    """Host headers that the server accepts.

    This prevents DNS rebinding: another site can make its own domain resolve to this server, and
    its scripts could then read our responses. The browser sends that domain as Host, so the server
    can refuse the request.
    """

    def __init__(self, bound: str, names: Collection[str]) -> None:
        address = ipaddress.ip_address(socket.getaddrinfo(bound, None)[0][4][0])
        self._any_address = address.is_unspecified
        self._names = {bound.lower(), str(address), *(name.lower() for name in names)}
        if address.is_loopback or address.is_unspecified:
            self._names |= {"localhost", "127.0.0.1", "::1"}
        if not address.is_loopback:
            self._names.add(socket.gethostname().lower())

    def __contains__(self, host: object) -> bool:
        try:
            parts = urlsplit(f"//{host}")
            name = parts.hostname or ""
            if parts.netloc != host or parts.username is not None:
                return False
            if name in self._names:
                return True
            # DNS rebinding needs a name; an IP address is safe.
            return self._any_address and bool(ipaddress.ip_address(name))
        except ValueError:
            return False


class RequestChecks:
    """Middleware that stores uploads; it refuses requests from other sites or for unknown files."""

    def __init__(
        self, app: Callable[..., Awaitable[None]], hosts: AllowedHosts, uploads: Uploads
    ) -> None:
        self._app, self._hosts, self._uploads = app, hosts, uploads

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":  # the page uses no web sockets
            try:
                answer = await self._answer(scope, receive)
            except RequestError as error:
                answer = PlainTextResponse(str(error), error.status)
            if isinstance(answer, Response):
                await answer(scope, receive, send_with_headers)
            else:
                await self._app(scope, answer, send_with_headers)

    async def _answer(self, scope: Message, receive: Any) -> Response | Callable[..., Any]:
        """Return the response to a request or, if Gradio must respond, the `receive` for Gradio."""
        self._check_site(scope)
        path = scope["path"].rstrip("/")
        if path.endswith("/upload_progress"):  # uploads do not pass through Gradio
            return Response('data: {"msg": "done"}\n\n', media_type="text/event-stream")
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return receive
        if path.endswith("/upload"):
            return JSONResponse([await self._uploads.store(scope, receive)])
        return await self._checked_body(receive)

    def _check_site(self, scope: Message) -> None:
        """Raise RequestError if there is not one known Host, or if Origin is a different host."""
        headers = [(name, value.decode("latin-1")) for name, value in scope["headers"]]
        hosts = [value for name, value in headers if name == b"host"]
        if len(hosts) != 1 or hosts[0] not in self._hosts:
            raise RequestError(421, "unknown Host; `demo --allow-host NAME` allows further names")
        for origin in [value for name, value in headers if name == b"origin"]:
            if origin.split("://")[-1].lower() != hosts[0].lower():
                raise RequestError(403, "requests from other sites are refused")

    async def _checked_body(self, receive: Any) -> Callable[..., Any]:
        """Read a JSON body and check its file paths; return a `receive` that repeats the body.

        Without the check, Gradio would accept any file or folder in its temporary folder, and would
        download URLs.
        """
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > _MAX_BODY_BYTES:
                raise RequestError(413, f"a request may have at most {_MAX_BODY_BYTES} bytes")
        try:
            paths = [*_paths(json.loads(body))] if body else []
        except (ValueError, RecursionError):
            raise RequestError(400, "the body must be JSON") from None
        if not all(isinstance(path, str) and path in self._uploads for path in paths):
            raise RequestError(403, "the file is not on the server; upload it again")
        messages = iter([{"type": "http.request", "body": body}])

        async def repeat() -> Any:
            return next(messages, None) or await receive()

        return repeat


def _paths(tree: Any) -> Iterator[Any]:
    """The values of all keys `path` in JSON data."""
    if isinstance(tree, dict):
        if "path" in tree:
            yield tree["path"]
        tree = list(tree.values())
    if isinstance(tree, list):
        for value in tree:
            yield from _paths(value)
