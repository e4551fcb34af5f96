"""The demo: what the page is answered, and the page itself in a real browser."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import av
import numpy as np
import pytest

from slowfast_lara.attention import ESTIMATORS
from slowfast_lara.data.decode import check_length
from slowfast_lara.errors import DecodeError
from slowfast_lara.inference.load import load
from slowfast_lara.visualization.heat_maps import Drawing
from slowfast_lara.visualization.scene import Scene
from slowfast_lara.visualization.trajectories import Point
from tests.helpers.browser import CHROMIUM, Browser
from tests.helpers.commands import demo as main
from tests.helpers.preloaded import environment
from tests.helpers.runs import free_port, start, wait_for
from tests.helpers.small_models import only_error

SECONDS = 60


def write_long(path: Path, seconds: float, *, frames: int = 40) -> Path:
    """A small file that takes long to watch."""
    tick = Fraction(1, 240)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=240)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        for number in range(frames):
            picture = np.full((32, 32, 3), number % 250, np.uint8)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.time_base, frame.pts = tick, number * int(seconds / tick / (frames - 1))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def junk(folder: Path) -> dict[str, Path]:
    """What is said of a file, and the file."""
    folder.mkdir(parents=True)
    (folder / "empty.mp4").touch()
    (folder / "text.mp4").write_text("no video " * 1000)
    return {
        "empty.mp4: Invalid data": folder / "empty.mp4",
        "text.mp4: Invalid data": folder / "text.mp4",
        "hours.mp4: longer than": write_long(folder / "hours.mp4", 3 * 3600),
    }


def test_length_is_limited_without_decoding(tmp_path):
    video = str(write_long(tmp_path / "v.mp4", 20))
    check_length(video, 20.5)
    with pytest.raises(DecodeError, match="v.mp4: longer than 19 seconds or 2280 frames"):
        check_length(video, 19)
    # Timestamps that feign a short video.
    fast = str(write_long(tmp_path / "fast.mp4", 1.9, frames=280))
    check_length(fast, 3)
    with pytest.raises(DecodeError, match="longer than 2 seconds or 240 frames"):
        check_length(fast, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no run given"),
        (["nowhere"], "nowhere: no such run"),
        (["--views", "31"], "views is 31; 1 to 30"),
        (["--port", "0"], "at least 1"),
        (["--port", "70000"], "1 to 65535"),
        (["--host", "192.0.2.1"], "192.0.2.1:7860 cannot be served: Cannot assign"),
        (["--host", "no such host"], "cannot be served: "),
    ],
)
def test_bad_input_is_one_line(model, capsys, arguments, said):
    flags = model.flags() if {"--views", "--host"} & {*arguments} else []
    try:
        code = main([*flags, *arguments])
    except SystemExit as ended:  # argparse
        code = ended.code
    assert code == 2 and said in only_error(capsys)


def test_gradio_is_asked_for(model, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main(model.flags()) == 2
    assert "gradio is needed for this; pip install 'slowfast_lara[demo]'" in only_error(capsys)


@pytest.fixture(scope="module")
def page(model, names):
    pytest.importorskip("gradio", reason="the extra `demo` is not installed")
    from slowfast_lara.visualization.demo_page import Page

    return Page(load(model.cfg, model.checkpoint, classes=names), 3, SECONDS)


def upload(video: str | Path, folder: Path) -> Path:
    """A copy in a folder of its own, as Gradio makes it."""
    folder.mkdir()
    return Path(shutil.copy(video, folder / os.path.basename(video)))


def test_a_video_is_taken_and_removed(page, clips, tmp_path):
    path = upload(clips[0], tmp_path / "hash")
    said, classes, scene, slider, frame, picture = page.take(str(path))
    expected = page._model(clips[0], views=3)
    assert said.startswith("The mean of 3 views") and picture is None
    assert list(classes.items()) == [*zip(expected.top().names, expected.top().scores)]
    assert slider.maximum == 3 and slider.value == 2 and slider.visible
    # Each pixel is a square of 12: a click is a pixel of the view.
    np.testing.assert_array_equal(frame[::12, ::12], scene.pixels[2])
    assert frame.shape == (384, 384, 3)
    np.testing.assert_array_equal(page.frame(scene, 0)[::12, ::12], scene.pixels[0])
    assert not list(tmp_path.iterdir())


def test_the_same_video_dropped_again_meanwhile(page, clips, tmp_path, monkeypatch):
    path = str(upload(clips[0], tmp_path / "hash"))
    with monkeypatch.context() as patched:
        patched.setattr(
            "slowfast_lara.visualization.demo_page.check_length",
            lambda *_: upload(clips[0], tmp_path / "hash"),
        )
        assert page.take(path)[0].startswith("The mean of")
    assert page.take(path)[0].startswith("The mean of") and not list(tmp_path.iterdir())


def test_a_click_shows_its_patch(page, clips, tmp_path):
    scene = page.take(str(upload(clips[0], tmp_path / "hash")))[2]

    def look(x: float, y: float, frame: int) -> np.ndarray:
        return page.look(scene, frame, SimpleNamespace(index=[x, y]))

    for click, point in (((12 * 20 + 5, 12 * 9), Point(20, 9, 3)), ((400, -3), Point(31, 0, 3))):
        own = Scene(page._model, clips[0])
        pictures = own.look(point, list(ESTIMATORS))
        drawing = Drawing(own.pixels, own.grid, pictures, point, own.shares_of)
        np.testing.assert_array_equal(look(*click, 3), drawing.strip())
    assert not np.array_equal(look(0, 0, 0), look(380, 0, 0))
    assert not np.array_equal(look(0, 0, 0), look(0, 0, 3))


def test_junk_is_one_line(page, tmp_path):
    for number, (said, path) in enumerate(junk(tmp_path / "junk").items()):
        answer = page.take(str(upload(path, tmp_path / str(number))))
        assert said in answer[0] and "\n" not in answer[0] and str(tmp_path) not in answer[0]
        assert answer[1] is answer[2] is answer[4] is answer[5] is None
    assert os.listdir(tmp_path) == ["junk"]
    assert page.take(None)[:3] == ("", None, None)
    assert page.frame(None, 0) is None and page.look(None, 0, None) is None


@pytest.fixture()
def served(model, names, tmp_path, monkeypatch):
    """The address of the page of a real process, and the process; its temporary folder is ours."""
    pytest.importorskip("gradio", reason="the extra `demo` is not installed")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    # PyTorch makes this one, below TMPDIR if it is not said.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    port = free_port()
    flags = (*model.flags(), "--classes", names, "--port", port, "--megabytes", 1, "--minutes", 1)
    process = start("demo", *flags, program=("-m", "slowfast_lara.cli"), folder=tmp_path)
    line = process.stdout.readline()
    assert line == f"http://127.0.0.1:{port}/ is the page; Ctrl-C ends it\n", process.stderr.read()
    return line.split()[0], process


def reaches(port: int, host: str) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except OSError:
        return False


def own_address() -> str:
    """This machine's address for others, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            return "127.0.0.2"
        return probe.getsockname()[0]


def text_of(browser: Browser, selector: str) -> str:
    element = f"document.querySelector({selector!r})"
    return browser.run(f"const e = {element}; return e ? e.value || e.textContent : ''")


def source_of(browser: Browser, selector: str) -> str:
    return browser.run(f"const e = document.querySelector({selector!r}); return e ? e.src : ''")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium with chromedriver")
def test_in_a_browser(served, clips, tmp_path):
    """Upload, click, scrub, junk; nothing is asked of other machines; nothing is left."""
    address, process = served
    port, temporary = urlsplit(address).port, tmp_path / "temporary"
    assert not reaches(port, own_address())
    asked, drop = [], "#video input[type=file]"
    with Browser(tmp_path, width=1100, height=1300, phone=False) as browser:

        def new_source(selector: str, old: str = "") -> str:
            wait_for(lambda: source_of(browser, selector) not in ("", old))
            return source_of(browser, selector)

        browser.open(address)
        wait_for(lambda: browser.run(f"return !!document.querySelector({drop!r})"))
        browser.type(drop, clips[0])
        frame = new_source("#frame img")
        assert "views. Now click a patch" in text_of(browser, "#said textarea")
        assert "%" in text_of(browser, "#classes")
        assert source_of(browser, "#picture img") == ""
        browser.click_at("#frame img", 0.3, 0.4)
        first = new_source("#picture img")
        browser.click_at("#frame img", 0.8, 0.7)
        second = new_source("#picture img", first)
        browser.type("#number input[type=range]", "\ue012")  # the left arrow: a frame back
        new_source("#frame img", frame)
        browser.click_at("#frame img", 0.8, 0.7)
        new_source("#picture img", second)
        asked += browser.requests()
        for said, path in junk(tmp_path / "junk").items():
            browser.run("document.querySelector('#video button[aria-label=\"Clear\"]')?.click()")
            wait_for(lambda: browser.run(f"return !!document.querySelector({drop!r})"))
            browser.type(drop, str(path))
            wait_for(lambda said=said: said in text_of(browser, "#said textarea"))
            assert source_of(browser, "#frame img") == ""
        asked += browser.requests()
        assert browser.errors() == []
    outside = [url for url in asked if urlsplit(url).scheme in ("http", "https", "ws", "wss")]
    assert len(outside) > 10 and {urlsplit(url).netloc for url in outside} == {f"127.0.0.1:{port}"}
    assert not list(temporary.rglob("*.mp4"))
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert not any(temporary.iterdir())


@pytest.mark.slow
def test_what_a_page_would_not_send(served, tmp_path):
    """A file that is too large is refused on the way, and nothing of it stays."""
    address, process = served
    body = b"--x\r\nContent-Disposition: form-data; name=files; filename=a.mp4\r\n\r\n"
    body += b"0" * 3_000_000 + b"\r\n--x--\r\n"
    request = Request(
        f"{address}gradio_api/upload", body, {"Content-Type": "multipart/form-data; boundary=x"}
    )
    with pytest.raises((HTTPError, URLError)):
        urlopen(request, timeout=30)
    assert urlopen(address, timeout=30).status == 200
    time.sleep(0.5)
    temporary = tmp_path / "temporary"
    assert sum(path.stat().st_size for path in temporary.rglob("*") if path.is_file()) < 100_000
    # Its port is taken now.
    port = str(urlsplit(address).port)
    again = [sys.executable, "-m", "slowfast_lara.cli", "demo", *process.args[4:8], "--port", port]
    done = subprocess.run(again, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and port in done.stderr
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0 and not any(temporary.iterdir())
