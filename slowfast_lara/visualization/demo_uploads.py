"""Storage of the demo's uploaded files, with a limit of their total size.

It replaces Gradio's storage. There, equal uploads share one path, because a file is named by its
hash, and the files of aborted uploads are not removed. Here every upload has its own folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request

from slowfast_lara.errors import InputError

# Limit of all stored uploads together, as a multiple of the limit of one file.
TOTAL_FILES = 5
# An upload that is not read within this time is removed when the next upload starts.
LIFETIME_SECONDS = 3600
# Allowance for the multipart headers of a request, a few hundred bytes.
_MULTIPART_BYTES = 10_000


class RequestError(Exception):
    """A request that is refused: HTTP status and message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Uploads:
    """Uploaded files that have not been read yet."""

    def __init__(self, folder: str, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._waiting: dict[str, tuple[float, int]] = {}  # path: time of arrival, bytes
        self._bytes = 0  # total size of waiting files and uploads in progress
        self._lock = threading.Lock()  # videos are read in a worker thread

    def __contains__(self, path: object) -> bool:
        return path in self._waiting

    async def store(self, scope: Mapping[str, Any], receive: Any) -> str:
        """Store the one file of a multipart request and return its path."""
        self._remove_expired()
        received = 0

        async def limited_receive() -> Mapping[str, Any]:
            nonlocal received
            message: Mapping[str, Any] = await receive()
            size = len(message.get("body", b""))
            self._reserve(size)
            received += size
            if received > self._max_bytes + _MULTIPART_BYTES:
                raise RequestError(413, f"a file may have at most {self._max_bytes} bytes")
            return message

        path = None
        try:
            # Starlette receives the file as an unnamed temporary file, which vanishes on errors.
            # With an "app" in the scope, Starlette raises HTTPException, not MultiPartException.
            scope = {key: value for key, value in scope.items() if key != "app"}
            request = Request(scope, limited_receive)
            async with request.form(max_files=1) as form:
                file = form.get("files")
                if not isinstance(file, UploadFile):
                    raise RequestError(400, "expected multipart/form-data with the file in `files`")
                path = await run_in_threadpool(self._save, file)
            self._waiting[path] = time.monotonic(), received
            return path
        except ClientDisconnect:
            raise RequestError(400, "the upload was interrupted") from None
        except MultiPartException as error:
            raise RequestError(400, error.message) from None
        finally:
            if path is None:
                self._release(received)

    def _save(self, file: UploadFile) -> str:
        name = re.split(r"[/\\]", file.filename or "")[-1]
        name = re.sub(r"[^\w.\- ]", "_", name).lstrip(".")[-60:] or "video"
        folder = os.path.join(self._folder, secrets.token_urlsafe(16))
        os.makedirs(folder)
        path = os.path.join(folder, name)
        try:
            with open(path, "xb") as copy:
                shutil.copyfileobj(file.file, copy)
        except BaseException:
            shutil.rmtree(folder)
            raise
        return path

    @contextlib.contextmanager
    def take(self, path: str) -> Iterator[str]:
        """Yield the path of an upload to read; the file is removed afterwards."""
        with self._lock:
            _, size = self._waiting.pop(path, (0.0, 0))
        if not size:
            raise InputError("the file is no longer on the server; upload it again")
        folder, name = os.path.split(path)
        reading = f"{folder}.reading"  # renamed, because Gradio may remove the old path
        try:
            os.rename(folder, reading)
            yield os.path.join(reading, name)
        finally:
            shutil.rmtree(reading, ignore_errors=True)
            self._release(size)

    def _remove_expired(self) -> None:
        oldest = time.monotonic() - LIFETIME_SECONDS
        for path, (arrival, _) in [*self._waiting.items()]:
            if arrival < oldest:
                with contextlib.suppress(InputError, OSError), self.take(path):
                    pass

    def _reserve(self, size: int) -> None:
        with self._lock:
            if self._bytes + size > TOTAL_FILES * self._max_bytes:
                raise RequestError(507, "too many uploads are waiting; try again later")
            self._bytes += size

    def _release(self, size: int) -> None:
        with self._lock:
            self._bytes -= size
