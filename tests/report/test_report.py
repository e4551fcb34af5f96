"""The report of a real run: content, escaping, and behaviour in a browser."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
import yaml

from slowfast_lara.runs.folder import read_run
from tests.helpers.browser import CHROMIUM, Browser
from tests.helpers.commands import report as main
from tests.helpers.runs import run_ok
from tests.helpers.small_models import NAMES, make_videos, only_error, small_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two short epochs and a test in which one video fails."""
    folder = tmp_path_factory.mktemp("run")
    videos = make_videos(folder / "set", 12, "--frames", "12", "--train", "8", "--val", "4")
    (videos / "classes.json").write_text(json.dumps(NAMES))
    bad = videos / "videos" / "<i>bad.mp4"
    bad.write_text("not a video")
    with (videos / "test.csv").open("a") as file:
        file.write(f"{bad} 1\n")
    config = small_config()
    config["SOLVER"] = {"MAX_EPOCH": 2, "BASE_LR": 0.001}
    config["DATA_LOADER"] = {"NUM_WORKERS": 0}
    config["LOG_PERIOD"] = 1
    config["DATA"]["PATH_TO_DATA_DIR"] = str(videos)
    config["OUTPUT_DIR"] = str(folder / "my <run>")
    (folder / "c.yaml").write_text(yaml.safe_dump(config))
    run_ok("--cfg", folder / "c.yaml")
    return folder / "my <run>"


@pytest.fixture(scope="module")
def page(run: Path) -> Path:
    assert main([str(run)]) == 0
    return run / "report.html"


class Reader(HTMLParser):
    """Texts by element, and all attributes that load something."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.tags, self.links = "", [], []
        self.in_code = False

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.in_code = tag in ("script", "style")
        self.links += [value for key, value in attrs if key in ("src", "href", "srcset", "data")]

    def handle_endtag(self, tag):
        self.in_code = False

    def handle_data(self, data):
        self.text += "" if self.in_code else data


def read(page: Path) -> Reader:
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    return reader


def test_report_contains_the_run(run, page):
    results = json.loads((run / "test_results.json").read_text())
    environment = json.loads((run / "environment.json").read_text())
    reader = read(page)
    assert f"{results['top1_acc']:.2f} %top-1 accuracy" in reader.text
    assert f"{results['top5_acc']:.2f} %top-5 accuracy" in reader.text
    assert "12videos tested" in reader.text and "1videos failed" in reader.text
    assert "clips per second" in reader.text
    assert environment["packages"]["torch"] in reader.text
    assert str(environment["git_commit"]) in reader.text
    assert "APPROX_ATTN_TYPE: lara" in reader.text
    assert "<i>bad.mp4" in reader.text and results["failed"][0]["reason"] in reader.text
    assert results["failed"][0]["label_name"] == NAMES[1]
    assert reader.tags.count("svg") >= 3
    wrong = [video for video in results["videos"] if video["top5"][0] != video["label"]]
    assert reader.tags.count("img") == len(wrong) > 0
    worst = max(wrong, key=lambda video: video["top5_scores"][0])
    first = re.search(r'class="error">.*?class="quiet">(.*?)</p>', page.read_text(), re.DOTALL)
    assert first.group(1) == worst["path"]


def test_report_is_escaped_and_self_contained(page):
    reader = read(page)
    assert "b" in reader.tags and "i" not in reader.tags  # names are text
    assert "<b>bold</b> & $x$" in reader.text
    assert reader.links and all(link.startswith("data:image/") for link in reader.links)
    style = re.search("<style>(.*?)</style>", page.read_text(), re.DOTALL).group(1)
    assert "url(" not in style and "@import" not in style
    assert "default-src 'none'" in page.read_text()


def test_validation_loss_is_in_the_chart_of_the_loss(page):
    (caption,) = re.findall("<figcaption>(loss:.*?)</figcaption>", page.read_text())
    assert "training" in caption and "validation" in caption


@pytest.mark.parametrize(
    "name, title", [("output", "sixth/output, lara attention"), ("a_7", "a_7")]
)
def test_title_tells_runs_apart(run, tmp_path, name, title):
    folder = shutil.copytree(run, tmp_path / "sixth" / name)
    assert main([str(folder)]) == 0
    text = (folder / "report.html").read_text()
    assert f"<h1>{title}</h1>" in text and f"<title>{title}: report</title>" in text


def test_summary_shows_the_settings_of_the_test(run, tmp_path):
    """A later test may use another attention than training."""
    folder = shutil.copytree(run, tmp_path / "later")
    config = folder / "test_config.yaml"
    text = config.read_text()
    config.write_text(text.replace("APPROX_ATTN_TYPE: lara", "APPROX_ATTN_TYPE: performer"))
    assert main([str(folder)]) == 0
    summary = re.search('<p class="quiet">(.*?)</p>', (folder / "report.html").read_text())[1]
    assert "performer attention" in summary and "lara" not in summary


def test_class_names_come_from_the_checkpoint(run, tmp_path):
    """The folder of the lists may have moved, or have other names now."""
    folder = shutil.copytree(run, tmp_path / "moved")
    config = folder / "config.yaml"
    text = re.sub("PATH_TO_DATA_DIR: .*", "PATH_TO_DATA_DIR: nowhere", config.read_text())
    config.write_text(text)
    assert main([str(folder)]) == 0
    assert "<b>bold</b> & $x$" in read(folder / "report.html").text


def test_invalid_class_names_are_not_fatal(run, tmp_path):
    """Training warns of names that do not fit, and `load` ignores them."""
    folder = shutil.copytree(run, tmp_path / "run")
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists/classes.json").write_text('["too", "few"]')
    for path in (folder / "checkpoints").iterdir():
        path.unlink()
    results = json.loads((folder / "test_results.json").read_text())
    (folder / "test_results.json").write_text(json.dumps(results | {"checkpoint": "none.pyth"}))
    config = folder / "config.yaml"
    lists = f"PATH_TO_DATA_DIR: {tmp_path / 'lists'}"
    config.write_text(re.sub("PATH_TO_DATA_DIR: .*", lists, config.read_text()))
    assert main([str(folder)]) == 0
    assert "class 0" in read(folder / "report.html").text


def test_unknown_parts_of_the_environment_are_left_out(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    environment = json.loads((folder / "environment.json").read_text())
    environment |= {"cuda": None, "git_commit": None, "gpus": [], "cpus": 0}
    (folder / "environment.json").write_text(json.dumps(environment))
    assert main([str(folder)]) == 0
    section = read(folder / "report.html").text.partition("Environment")[2].partition("Config")[0]
    assert not re.search("null|None|cuda|gpus|git commit", section) and "cpus0" in section


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium with chromedriver")
def test_in_a_browser(run, page, tmp_path):
    results = json.loads((run / "test_results.json").read_text())
    with Browser(tmp_path, width=390, height=840) as browser:
        browser.open(page.resolve().as_uri())
        names = (
            "return [...document.querySelectorAll('#classes tbody tr')].filter("
            "row => !row.hidden).map(row => row.cells[0].textContent)"
        )
        assert browser.run(names) == NAMES
        assert browser.run("return document.title") == "my <run>: report"

        browser.click("#classes th:nth-child(1) button")
        ascending = browser.run(names)
        assert sorted(ascending) == sorted(NAMES) and ascending != NAMES
        browser.click("#classes th:nth-child(1) button")
        assert browser.run(names) == ascending[::-1]
        browser.click("#classes th:nth-child(3) button")
        shares = browser.run(
            "return [...document.querySelectorAll('#classes tbody tr')].map("
            "row => Number(row.cells[2].textContent))"
        )
        expected = sorted(round(entry["top1_acc"], 1) for entry in results["per_class"].values())
        assert shares == expected

        browser.type("input[data-for=classes]", "BOLD")
        assert browser.run(names) == ["<b>bold</b> & $x$"]
        # Nothing is wider than a phone, no errors, all images load.
        assert browser.run("return document.documentElement.scrollWidth") <= 390
        assert browser.run(
            "return [...document.images].every(image => { image.loading = 'eager'; return true })"
        )
        assert browser.run(
            "return Promise.all([...document.images].map(image => image.decode()"
            ".then(() => image.naturalWidth > 0))).then(all => all.every(Boolean))"
        )
        assert browser.errors() == []
        (tmp_path / "page.png").write_bytes(browser.screenshot())


def test_missing_files_are_left_out(run, tmp_path):
    for name in ("stdout.log", "test_results.json"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_bytes((run / name).read_bytes())
        assert main([str(folder), "--out", str(tmp_path / f"{name}.html")]) == 0
        text = read(tmp_path / f"{name}.html").text
        assert ("Learning curves" in text) == (name == "stdout.log")
        assert ("Confusion matrix" in text) == (name == "test_results.json")


def test_many_classes_and_missing_videos(tmp_path):
    videos = [
        {
            "path": f"gone/{i}.mp4",
            "label": i % 400,
            "num_views": 1,
            "top5": [i % 400 if i % 3 else 7, 1, 2, 3, 4],
            "top5_scores": [0.5, 0.2, 0.1, 0.1, 0.05],
        }
        for i in range(800)
    ]
    (tmp_path / "test_results.json").write_text(json.dumps({"videos": videos, "failed": []}))
    assert main([str(tmp_path)]) == 0
    reader = read(tmp_path / "report.html")
    assert reader.text.count("video cannot be read") == 24
    assert len(reader.links) == 1  # the confusion matrix as an image
    assert "class 399" in reader.text


def test_bad_input_is_one_line(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for name, content, message in (
        ("cut", '{"videos": [', "is not JSON"),
        ("other", '{"videos": [{"path": "a"}], "failed": []}', "does not contain test results"),
        ("list", "[]", "expected a JSON object"),
        (
            "short",
            '{"videos": [{"path": "a", "label": 0, "top5": [], "top5_scores": []}]}',
            "entry for the video a",
        ),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test_results.json").write_text(content)
        assert main([str(tmp_path / name)]) == 2, name
        assert message in only_error(capsys)
        assert not (tmp_path / name / "report.html").exists()
    for folder, message in (("empty", "not a run"), ("nowhere", "no such folder")):
        assert main([str(tmp_path / folder)]) == 2
        assert message in only_error(capsys)
    assert main([str(run), "--classes", str(tmp_path / "no.json")]) == 2
    assert "no.json" in only_error(capsys)


def test_log_of_a_resumed_run(tmp_path):
    """Truncated lines are skipped; a repeated epoch replaces the earlier one."""
    lines = [
        'x json_stats: {"_type": "train_epoch", "epoch": "1/2", "loss": 9.0}',
        'x json_stats: {"_type": "train_epoch", "epoch": "1/2", "loss": 1.5}',
        'x json_stats: {"_type": "train_epoch", "epoch": "2/2", "loss": NaN}',
        'x json_stats: {"_type": "train_ep',
    ]
    (tmp_path / "stdout.log").write_text("\n".join(lines))
    assert read_run(str(tmp_path), None).curve("train_epoch", "loss") == [(1.0, 1.5)]
    assert main([str(tmp_path)]) == 0
