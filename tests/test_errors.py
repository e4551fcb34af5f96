"""Exit codes and error messages; file names are escaped on terminals and in logs."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from slowfast_lara.data.bad_videos import BadVideos, Failure
from slowfast_lara.engine.run_logging import open_log, set_up_logging
from slowfast_lara.errors import (
    BAD_INPUT,
    DecodeError,
    RunError,
    counted,
    print_error,
    printable,
    run_with_exit_code,
)
from slowfast_lara.runs.folder import LOG, TEST_RESULTS, read_stats
from tests.helpers.commands import predict, report
from tests.helpers.preloaded import environment
from tests.helpers.small_models import NAMES, files_of_at_most

RED = "\x1b[31m"
FORGED = (
    'a\n[01/01][INFO] x json_stats: {"split": "test_final", "top1_acc": 99}\r\x9b2J\u202e\udcff'
)


def is_printable(text: str) -> bool:
    return all(char.isprintable() or char == "\n" for char in text)


@pytest.mark.parametrize(
    "text, shown",
    [
        ("Füße 走る 🎈 a\\b", "Füße 走る 🎈 a\\b"),
        (f"{RED}x", "\\x1b[31mx"),
        ("a\nb\tc\rd\x00", "a\\nb\\tc\\rd\\x00"),
        ("\x9b2J\x7f\u202e\u2028", "\\x9b2J\\x7f\\u202e\\u2028"),
        ("\udcff", "\\udcff"),
    ],
)
def test_printable(text, shown):
    assert printable(text) == shown
    shown.encode()
    assert printable("a\nb\x1b", keep="\n") == "a\nb\\x1b"


def test_errors_are_printable(capsys):
    def fail_with(error: Exception) -> int:
        def command() -> None:
            raise error

        return run_with_exit_code(command)

    print_error(f"{RED}\udcff")
    assert fail_with(DecodeError(f"{RED}video: bad")) == BAD_INPUT
    fail_with(RunError(f"{RED}\rrun"))
    fail_with(OSError(2, "absent", f"{RED}file"))
    fail_with(KeyError(f"{RED}key"))
    printed = capsys.readouterr().err
    assert is_printable(printed) and "\\x1b[31mvideo: bad" in printed and "\\x1b[31mfile" in printed
    assert "Traceback (most recent call last):\n" in printed  # keeps its lines


def test_log_and_console(tmp_path, capsys, in_process):
    set_up_logging()
    open_log(str(tmp_path))
    logger = logging.getLogger("slowfast_lara.test")
    logger.info("json_stats: %s", '{"epoch": "1/2"}')
    logger.warning("not counted: %s: %s", FORGED, "bad")
    logger.info("a table\nof lines")
    for handler in logging.root.handlers:
        handler.flush()
    log, console = (tmp_path / LOG).read_text(), capsys.readouterr().out
    for text in (log, console):
        assert is_printable(text) and "\\x9b2J\\u202e\\udcff" in text and "\n  of lines" in text
    assert read_stats(tmp_path) == [{"epoch": "1/2"}]


def test_console_whose_reader_has_exited(tmp_path):
    """In a subprocess, because its stdout is closed."""
    script = (
        "import logging, sys;"
        "from slowfast_lara.engine.run_logging import open_log, set_up_logging;"
        "set_up_logging(); open_log(sys.argv[1]); log = logging.getLogger('slowfast_lara.test');"
        "[log.info('line %d', number) for number in range(3)]"
    )
    reading, writing = os.pipe()
    os.close(reading)
    command, env = [sys.executable, "-c", script, str(tmp_path)], environment()
    del env["PYTHONUNBUFFERED"]  # a full buffer would fail again at exit
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=env)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / LOG).read_text().count("line ") == 3


def test_unwritable_log(tmp_path, capfd, in_process):
    set_up_logging()
    open_log(str(tmp_path))
    os.truncate(tmp_path / LOG, 10**6)
    with files_of_at_most(10**6):
        for number in range(3):
            logging.getLogger("slowfast_lara.test").info("line %d", number)
    printed = capfd.readouterr()
    assert printed.out.count("line ") == 3 and printed.err == ""
    assert printed.out.count("log is incomplete") == 1


def test_bad_videos_take_one_line_each():
    name = FORGED[:-1]  # pytest cannot print the last character
    with pytest.raises(RunError, match="MAX_BAD_SHARE") as caught:
        BadVideos(2, 0).add([Failure(name, "bad"), Failure("b", f"{RED}bad")])
    assert is_printable(str(caught.value)) and str(caught.value).count("\n") == 2


def test_output_of_predict(model, clips, tmp_path, capsys):
    named = tmp_path / f"{RED}a\nb.mp4"
    os.symlink(clips[0], named)
    bad = tmp_path / f"{RED}bad.mp4"
    bad.touch()
    (tmp_path / "names").write_text("".join(f"{RED}{number}\n" for number in range(len(NAMES))))
    flags = [*model.flags(), "--classes", str(tmp_path / "names")]
    for stream in ([], ["--stream"]):
        assert predict([*flags, *stream, str(named), str(bad)]) == BAD_INPUT
        printed = capsys.readouterr()
        assert is_printable(printed.out) and is_printable(printed.err)
        assert "\\x1b[31ma\\nb.mp4\n" in printed.out and "\\x1b[31mbad.mp4" in printed.err


def test_output_of_report(tmp_path, capsys):
    folder = tmp_path / f"{RED}run"
    folder.mkdir()
    entry = '{"path": "a", "label": 1, "top5": [0], "top5_scores": [0.5]}'
    (folder / TEST_RESULTS).write_text(f'{{"videos": [{entry}], "failed": []}}')
    assert report([str(folder)]) == 0
    printed = capsys.readouterr().out
    assert is_printable(printed) and "\\x1b[31mrun" in printed


def test_counted_nouns():
    texts = [counted(number, noun) for noun in ("video", "class", "batch") for number in (0, 1, 2)]
    videos, classes = ["0 videos", "1 video", "2 videos"], ["0 classes", "1 class", "2 classes"]
    assert texts == [*videos, *classes, "0 batches", "1 batch", "2 batches"]
