"""The demo: handlers of the page, and the page in a real browser."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import av
import numpy as np
import pytest

from slowfast_lara.data.video import check_length
from slowfast_lara.errors import DecodeError
from slowfast_lara.inference.load import load
from slowfast_lara.visualization.attention_view import AttentionView, default_attentions
from slowfast_lara.visualization.heat_maps import HeatMapFigure
from slowfast_lara.visualization.token_grid import QueryPoint
from tests.helpers.browser import CHROMIUM, Browser
from tests.helpers.commands import demo as main
from tests.helpers.runs import free_port, wait_for
from tests.helpers.small_models import only_error

SECONDS = 60


def write_long(path: Path, seconds: float, *, frames: int = 40) -> Path:
    """A small file with a long duration."""
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


def bad_files(folder: Path) -> dict[str, Path]:
    """Files that cannot be shown, by their error message."""
    folder.mkdir(parents=True)
    (folder / "empty.mp4").touch()
    (folder / "text.mp4").write_text("not a video " * 1000)
    return {
        "empty.mp4: Invalid data": folder / "empty.mp4",
        "text.mp4: Invalid data": folder / "text.mp4",
        "hours.mp4: ": write_long(folder / "hours.mp4", 3 * 3600),
    }


def test_length_is_limited_without_decoding(tmp_path):
    video = str(write_long(tmp_path / "v.mp4", 20))
    check_length(video, 20.5)
    with pytest.raises(DecodeError, match="v.mp4: .*19 seconds or 2280 frames"):
        check_length(video, 19)
    # The timestamps claim a shorter video than it has frames for.
    fast = str(write_long(tmp_path / "fast.mp4", 1.9, frames=280))
    check_length(fast, 3)
    with pytest.raises(DecodeError, match="2 seconds or 240 frames"):
        check_length(fast, 2)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "no run given"),
        (["nowhere"], "nowhere: no such run"),
        (["--views", "31"], "views is 31"),
        (["--port", "0"], "--port"),
        (["--port", "70000"], "65535"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1:7860: Cannot assign"),
        (["--host", "no such host"], "cannot listen on "),
    ],
)
def test_bad_input_is_one_line(model, capsys, arguments, text):
    flags = model.flags() if {"--views", "--host"} & {*arguments} else []
    try:
        code = main([*flags, *arguments])
    except SystemExit as ended:  # argparse
        code = ended.code
    assert code == 2 and text in only_error(capsys)


def test_gradio_is_missing(model, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert main([*model.flags(), "--port", str(free_port())]) == 2
    assert "pip install 'slowfast_lara[demo]'" in only_error(capsys)


@pytest.fixture(scope="module")
def page(model, names, tmp_path_factory):
    pytest.importorskip("gradio", reason="the extra `demo` is not installed")
    from slowfast_lara.visualization.demo_page import DemoPage
    from slowfast_lara.visualization.demo_uploads import Uploads

    folder = tmp_path_factory.mktemp("uploads")
    page = DemoPage(
        load(model.cfg, model.checkpoint, classes=names), Uploads(str(folder), 10**8), 3, SECONDS
    )
    yield page
    assert not any(folder.iterdir())


def upload(page, video: str | Path) -> dict[str, str]:
    """Store a file as the server does; the argument of the page's handler."""
    body = b"--x\r\nContent-Disposition: form-data; name=files; filename=%s\r\n\r\n%s\r\n--x--\r\n"
    body %= os.path.basename(video).encode(), Path(video).read_bytes()
    scope = {"type": "http", "headers": [(b"content-type", b"multipart/form-data; boundary=x")]}

    async def receive() -> dict:
        return {"type": "http.request", "body": body}

    return {"path": asyncio.run(page.uploads.store(scope, receive))}


def test_upload_is_scored_and_removed(page, clips):
    message, classes, view, slider, frame, figure = page.upload(upload(page, clips[0]))
    expected = page.model(clips[0], views=3)
    assert "3 views" in message and figure is None
    assert list(classes.items()) == [*zip(expected.top().names, expected.top().scores)]
    assert slider.maximum == 3 and slider.value == 2 and slider.visible
    # Each pixel is enlarged to 12 x 12, so a click selects one pixel of the view.
    np.testing.assert_array_equal(frame[::12, ::12], view.pixels[2])
    assert frame.shape == (384, 384, 3)
    np.testing.assert_array_equal(page.frame(view, 0)[::12, ::12], view.pixels[0])


def test_click_shows_the_attention_of_its_patch(page, clips):
    view = page.upload(upload(page, clips[0]))[2]

    def click(x: float, y: float, frame: int) -> np.ndarray:
        return page.click(view, frame, SimpleNamespace(index=[x, y]))

    clicks = {(12 * 20 + 5, 12 * 9): QueryPoint(20, 9, 3), (400, -3): QueryPoint(31, 0, 3)}
    for (x, y), point in clicks.items():
        own = AttentionView(page.model, clips[0])
        maps = own.attention_maps(point, default_attentions(own.cfg))
        figure = HeatMapFigure(own.pixels, own.grid, maps, point, own.total)
        np.testing.assert_array_equal(click(x, y, 3), figure.strip())
    assert not np.array_equal(click(0, 0, 0), click(380, 0, 0))
    assert not np.array_equal(click(0, 0, 0), click(0, 0, 3))


def test_bad_upload_gives_a_one_line_message(page, tmp_path):
    for text, path in bad_files(tmp_path / "bad").items():
        file = upload(page, path)
        answer = page.upload(file)
        assert text in answer[0] and "\n" not in answer[0]
        assert os.path.dirname(file["path"]) not in answer[0]
        assert answer[1] is answer[2] is answer[4] is answer[5] is None
    assert "upload it again" in page.upload(file)[0]
    assert page.upload(None)[:3] == ("Drop a video to begin.", None, None)
    assert page.frame(None, 0) is None and page.click(None, 0, None) is None


def test_upload_that_nobody_reads_is_removed(page, clips, monkeypatch):
    """When the next upload starts, an hour later."""
    old = upload(page, clips[0])
    monkeypatch.setattr("slowfast_lara.visualization.demo_uploads.LIFETIME_SECONDS", -1)
    new = upload(page, clips[1])
    assert not os.path.exists(old["path"]) and "upload it again" in page.upload(old)[0]
    assert "3 views" in page.upload(new)[0]


def test_empty_page_has_examples_and_the_name_of_the_model(model, names, clips, tmp_path):
    pytest.importorskip("gradio", reason="the extra `demo` is not installed")
    from slowfast_lara.visualization.demo_page import DemoPage, build
    from slowfast_lara.visualization.demo_uploads import Uploads

    missing = tmp_path / "missing.mp4"
    lines = [f"{missing} 5", f"{clips[0]} 2", f"{clips[1]} 2", f"{clips[2]} 0"]
    (tmp_path / "test.csv").write_text("\n".join(lines) + "\n")
    lists = ["DATA.PATH_TO_DATA_DIR", str(tmp_path)]
    loaded = load(model.cfg, model.checkpoint, classes=names, overrides=lists)
    page = DemoPage(loaded, Uploads(str(tmp_path), 10**8), 3, SECONDS)
    assert page.examples == [clips[0], clips[2]]  # one of each class
    shown = build(page).get_config_file()["components"]
    (dataset,) = (part["props"] for part in shown if part["props"].get("elem_id") == "examples")
    assert [sample[0] for sample in dataset["samples"]] == [
        os.path.basename(path) for path in page.examples
    ]
    (name,) = (part["props"] for part in shown if part["props"].get("elem_id") == "model")
    assert "model.pyth" in name["value"] and "lara" in name["value"]
    message, classes, view, *_ = page.example(1)
    assert "3 views" in message and os.path.exists(clips[2])  # not removed, unlike an upload
    assert [*classes] == loaded(clips[2], views=3).top().names
    np.testing.assert_array_equal(view.pixels, AttentionView(loaded, clips[2]).pixels)
    page.examples[1] = str(missing)
    assert "missing.mp4" in page.example(1)[0] and str(tmp_path) not in page.example(1)[0]


def test_page_without_a_test_list(page):
    assert page.examples == []


@pytest.mark.parametrize(
    ("bound", "allowed", "refused"),
    [
        ("127.0.0.1", "localhost 127.0.0.1:7 [::1]:7 Proxy.example", "192.0.2.1 evil.example [::]"),
        ("localhost", "localhost:7 127.0.0.1 proxy.example:7", "localhost.evil.example"),
        ("0.0.0.0", "localhost 192.0.2.1:7 [2001:db8::1] proxy.example", "evil.example x@[::1]"),
        ("192.0.2.1", "192.0.2.1:7 proxy.example", "localhost 127.0.0.1 192.0.2.2 192.0.2.1/x"),
    ],
)
def test_allowed_hosts(bound, allowed, refused):
    pytest.importorskip("gradio", reason="the extra `demo` is not installed")
    from slowfast_lara.visualization.demo_requests import AllowedHosts

    hosts = AllowedHosts(bound, ["proxy.EXAMPLE"])
    assert [host for host in allowed.split() if host not in hosts] == []
    assert [host for host in ["", *refused.split()] if host in hosts] == []
    assert (socket.gethostname() in hosts) == (bound not in ("127.0.0.1", "localhost"))


def reaches(port: int, host: str) -> bool:
    try:
        with socket.create_connection((host, port), timeout=5):
            return True
    except OSError:
        return False


def own_address() -> str:
    """This machine's address in its network, if it has one."""
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
    """Upload, click, change the frame, bad files; no outside requests, no files left."""
    address, process = served
    port, temporary = urlsplit(address).port, tmp_path / "temporary"
    assert not reaches(port, own_address())
    requested, drop = [], "#video input[type=file]"
    with Browser(tmp_path, width=1100, height=1300, phone=False) as browser:

        def new_source(selector: str, old: str = "") -> str:
            wait_for(lambda: source_of(browser, selector) not in ("", old))
            return source_of(browser, selector)

        browser.open(address)
        wait_for(lambda: browser.run(f"return !!document.querySelector({drop!r})"))
        assert "Drop a video" in text_of(browser, "#message textarea")
        browser.type(drop, clips[0])
        frame = new_source("#frame img")
        assert "views. Now click a patch" in text_of(browser, "#message textarea")
        assert "%" in text_of(browser, "#classes")
        assert source_of(browser, "#figure img") == ""
        browser.click_at("#frame img", 0.3, 0.4)
        first = new_source("#figure img")
        browser.click_at("#frame img", 0.8, 0.7)
        second = new_source("#figure img", first)
        browser.type("#number input[type=range]", "\ue012")  # left arrow: the previous frame
        new_source("#frame img", frame)
        browser.click_at("#frame img", 0.8, 0.7)
        new_source("#figure img", second)
        requested += browser.requests()
        for text, path in bad_files(tmp_path / "bad").items():
            browser.run("document.querySelector('#video button[aria-label=\"Clear\"]')?.click()")
            wait_for(lambda: browser.run(f"return !!document.querySelector({drop!r})"))
            browser.type(drop, str(path))
            wait_for(lambda text=text: text in text_of(browser, "#message textarea"))
            assert source_of(browser, "#frame img") == ""
        requested += browser.requests()
        assert browser.errors() == []
    outside = [url for url in requested if urlsplit(url).scheme in ("http", "https", "ws", "wss")]
    assert len(outside) > 10 and {urlsplit(url).netloc for url in outside} == {f"127.0.0.1:{port}"}
    assert not list(temporary.rglob("*.mp4"))
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, "")
    assert not any(temporary.iterdir())
