"""Chromium, driven by the WebDriver protocol."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

_DRIVER = shutil.which("chromedriver")
CHROMIUM = (shutil.which("chromium") or shutil.which("google-chrome")) if _DRIVER else None
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """A browser window of this size; with `phone`, the screen of a phone."""

    def __init__(self, folder: Path, *, width: int, height: int, phone: bool = True) -> None:
        arguments = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={folder / 'profile'}",
        ]
        options: dict[str, Any] = {"args": arguments, "binary": CHROMIUM}
        if phone:
            metrics = {"width": width, "height": height, "pixelRatio": 2.0, "mobile": True}
            options["mobileEmulation"] = {"deviceMetrics": metrics}
        else:
            arguments.append(f"--window-size={width},{height}")
        self._capabilities = {
            "browserName": "chrome",
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
            "goog:chromeOptions": options,
        }

    def __enter__(self) -> Browser:
        # Chromium creates a socket in TMPDIR, whose path must not exceed 108 characters.
        env = {name: value for name, value in os.environ.items() if name != "TMPDIR"}
        command = [_DRIVER, "--port=0"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
        try:
            for line in self._process.stdout:
                found = re.search(r"started successfully on port (\d+)", line)
                if found:
                    break
            self._base = f"http://127.0.0.1:{found.group(1)}/session"
            answer = self._send("POST", "", {"capabilities": {"alwaysMatch": self._capabilities}})
            self._base += f"/{answer['sessionId']}"
        except BaseException:
            self._process.kill()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._send("DELETE", "")
        finally:
            self._process.terminate()
            self._process.wait(timeout=20)

    def open(self, address: str) -> None:
        self._send("POST", "/url", {"url": address})

    def run(self, script: str) -> Any:
        return self._send("POST", "/execute/sync", {"script": script, "args": []})

    def click(self, selector: str) -> None:
        self._send("POST", f"/element/{self._find(selector)}/click", {})

    def click_at(self, selector: str, x: float, y: float) -> None:
        """Click a point of an element: fractions of its width and height."""
        self.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        rect = f"document.querySelector({selector!r}).getBoundingClientRect()"
        left, top, width, height = self.run(
            f"const r = {rect}; return [r.left, r.top, r.width, r.height]"
        )
        move = {
            "type": "pointerMove",
            "duration": 0,
            "x": round(left + x * width),
            "y": round(top + y * height),
        }
        press, release = ({"type": f"pointer{event}", "button": 0} for event in ("Down", "Up"))
        mouse = {"type": "pointer", "id": "mouse", "actions": [move, press, release]}
        self._send("POST", "/actions", {"actions": [mouse]})

    def requests(self) -> list[str]:
        """URLs requested since the last call."""
        entries = self._send("POST", "/se/log", {"type": "performance"})
        events = [json.loads(entry["message"])["message"] for entry in entries]
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def type(self, selector: str, text: str) -> None:
        self._send("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def errors(self) -> list[str]:
        entries = self._send("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] == "SEVERE"]

    def screenshot(self) -> bytes:
        return base64.b64decode(self._send("GET", "/screenshot"))

    def _find(self, selector: str) -> str:
        found = self._send("POST", "/element", {"using": "css selector", "value": selector})
        return found[_ELEMENT]

    def _send(self, method: str, path: str, content: dict[str, Any] | None = None) -> Any:
        data = None if content is None else json.dumps(content).encode()
        request = Request(
            self._base + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urlopen(request, timeout=120) as answer:
                return json.load(answer)["value"]
        except HTTPError as error:  # the body has the reason
            raise RuntimeError(error.read().decode(errors="replace")) from None
