"""`slowfast-lara SUBCOMMAND`, the scripts of tools/ and datasets/, and the other command lines."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest

import benchmarks.__main__
import studies.__main__
from slowfast_lara.cli import build_parser, main
from slowfast_lara.cli.parser import CommandParser, model_and_files
from tests.helpers.preloaded import environment
from tests.helpers.runs import ROOT, finish, start
from tests.helpers.small_models import only_error

pytestmark = pytest.mark.usefixtures("in_process")

SCRIPTS = sorted([*(ROOT / "tools").glob("*.py"), *(ROOT / "datasets").glob("*.py")])


def leaves(parser: CommandParser, *words: str) -> list[list[str]]:
    """The words of every subcommand that can be run."""
    if parser.handler:
        return [[*words]]
    return [leaf for name, sub in parser.subcommands.items() for leaf in leaves(sub, *words, name)]


EVERY = leaves(build_parser())
OTHER_PROGRAMS = {
    program: leaves(module.build_parser())
    for program, module in (("benchmarks", benchmarks.__main__), ("studies", studies.__main__))
}
NO_MODEL = ["--cfg", "no.yaml", "--checkpoint", "no.pyth"]
# Arguments that name missing or unusable files, for every subcommand.
BAD_FILES = [
    ["run", "--cfg", "no.yaml"],
    ["predict", *NO_MODEL, "no.mp4"],
    ["visualize", *NO_MODEL, "--out", "look", "no.mp4"],
    ["swap", "no"],
    ["export", "no", "out"],
    ["demo", "no"],
    ["report", "no"],
    ["configs", "no"],
    ["configs", "quick/lara", "--out", "file/mine.yaml"],
    ["data", "lists-kinetics", "no", "lists", "--train", "no.csv"],
    ["data", "lists-ssv2", "no", "no", "lists"],
    ["data", "lists-folder", "no", "lists"],
    ["data", "check", "bad.txt", "no.csv"],
    ["data", "drop-bad", "no.txt", "no.csv"],
    ["data", "prepare", "no", "out"],
    ["data", "speed", "--cfg", "no.yaml"],
    ["data", "synthetic", "file/set"],
    ["benchmark", "gpu", "--crops", "100"],
    ["approximation-error", "no", "no.mp4"],
    ["approximation-error", *NO_MODEL, "no.mp4"],
]
BAD_VALUES = [
    ["benchmarks", "crop", "--estimators", "no"],
    ["benchmarks", "stage", "--estimators", "no"],
    ["benchmarks", "length", "--estimators", "no"],
    ["benchmarks", "vjepa2", "--estimators", "no"],
    ["benchmarks", "errors", "--samples", "1000"],
    ["benchmarks", "data", "no.mp4"],
    ["benchmarks", "lists", "--start", "no"],
    ["benchmarks", "roofline", "--device", "C64"],
    ["benchmarks", "joint", "--devices", "C64"],
    ["benchmarks", "step", "--clips", "0"],
    ["benchmarks", "scale", "--gpus", "9"],
    ["benchmarks", "kernels", "--kernels", "no"],
    ["studies", "attention", "--rows", "no"],
    ["studies", "recipes", "--rows", "no"],
    ["studies", "pretrained", "no", "no.mp4"],
    ["studies", "videos", "no", "no"],
]


@pytest.fixture(autouse=True)
def _folder_with_one_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()


def code_of(arguments: list[str], command=main) -> int:
    try:
        return command(arguments)
    except SystemExit as end:  # from argparse
        return end.code


def test_help_lists_the_subcommands(capsys):
    assert code_of(["--help"]) == 0
    with_flag = capsys.readouterr().out
    assert main([]) == 2
    assert capsys.readouterr().out == with_flag
    assert set(build_parser().subcommands) < set(with_flag.split())


def test_version(capsys):
    assert code_of(["--version"]) == 0
    assert capsys.readouterr().out == f"{metadata.version('slowfast_lara')}\n"


HELP = """
import sys
from importlib import import_module
program, *words = sys.argv[1:]
main = import_module(program).main
try:
    main([*words, "--help"])
except SystemExit as end:
    assert end.code == 0
slow = {"torch", "slowfast", "fvcore", "numpy", "cv2", "av", "matplotlib"}
assert not slow & set(sys.modules), slow & set(sys.modules)
"""


def assert_help_is_fast(program: str, module: str, words: list[str]) -> None:
    command = [sys.executable, "-c", HELP, module, *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" ".join(["usage:", program, *words, ""])), done.stdout


@pytest.mark.parametrize("words", [[], ["data"], *EVERY], ids=" ".join)
def test_help_imports_no_torch(words):
    assert_help_is_fast("slowfast-lara", "slowfast_lara.cli", words)


@pytest.mark.parametrize("module", ["check", "lists", "lists_prepared", "prepare"])
def test_preparing_data_imports_no_torch(module):
    code = f"import sys, slowfast_lara.prepare.{module}; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("program", OTHER_PROGRAMS)
def test_help_of_the_other_programs_imports_no_torch(program):
    for words in OTHER_PROGRAMS[program]:
        assert_help_is_fast(f"python -m {program}", f"{program}.__main__", words)


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_unknown_flag(words, capsys):
    """It is named, although other arguments are missing."""
    assert code_of([*words, "--bogus"]) == 2
    assert "unknown flag --bogus; see --help" in only_error(capsys)


def test_unknown_flag_suggests_a_similar_one(capsys):
    for words, hint in (
        (["run", "--confg", "quick/lara"], "unknown flag --confg; did you mean --cfg?"),
        (["predict", "runs/a", "a.mp4", "--view=3"], "unknown flag --view; did you mean --views?"),
    ):
        assert code_of(words) == 2
        assert hint in only_error(capsys)


def test_bad_arguments_cover_every_subcommand():
    assert {tuple(words) for words in EVERY} == {
        tuple(words[:2] if words[0] in ("data", "benchmark") else words[:1]) for words in BAD_FILES
    }
    for program, commands in OTHER_PROGRAMS.items():
        assert commands == [words[1:2] for words in BAD_VALUES if words[0] == program]


@pytest.mark.parametrize("words", BAD_FILES, ids=" ".join)
def test_bad_file(words, capsys):
    assert code_of(words) == 2
    assert only_error(capsys)


@pytest.mark.parametrize("words", BAD_VALUES, ids=" ".join)
def test_bad_value_of_the_other_programs(words, capsys):
    module = {"benchmarks": benchmarks.__main__, "studies": studies.__main__}[words[0]]
    assert code_of(words[1:], module.main) == 2
    assert only_error(capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["benchmark", "gpu", "--crops", "100"], "expected a multiple of 16, got '100'"),
        (["swap", "run", "--landmarks", "0"], "expected an integer of at least 1, got '0'"),
        (["swap", "run", "VIT.DEPTH", "1", "b"], "'b' is neither a run nor a config key"),
        (["demo", "run", "--minutes", "0"], "expected an integer of at least 1, got '0'"),
        (["data", "lists-folder", "a", "b", "--group", "("], "invalid regular expression '('"),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_message_of_a_bad_value(words, message, capsys):
    assert code_of(words) == 2
    assert message in only_error(capsys)


def test_help_shows_default_values():
    text = " ".join(build_parser().subcommands["approximation-error"].format_help().split())
    assert "(default: 16 32 64 128 256)" in text and "(default: None)" not in text


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_unknown_flag_of_a_script(script):
    code, stdout, stderr = finish(start("--bogus", program=(str(script),)))
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: ") and len(stderr.splitlines()) == 1, stderr


def test_unknown_subcommand(capsys):
    for words, hint in (
        (["dance"], "known: run, "),
        (["predikt"], "did you mean predict?"),
        (["data", "chekc"], "did you mean check?"),
    ):
        assert code_of(words) == 2
        assert hint in only_error(capsys)


@pytest.mark.parametrize("pairs", [["VIT.DEPTH", "2"], ["NUM_GPUS", "0", "VIT.DEPTH", "2"]])
@pytest.mark.parametrize("marker", [[], ["--opts"]])
@pytest.mark.parametrize(
    ("words", "flag", "values"),
    [
        (["swap", "run", "--landmarks", "16", "64"], "landmarks", [16, 64]),
        (["swap", "run", "--attentions", "lara", "ra"], "attentions", ["lara", "ra"]),
        (["approximation-error", "run", "a.mp4", "--samples", "8"], "samples", [8]),
    ],
)
def test_overrides_after_a_list_of_values(words, flag, values, marker, pairs):
    args = build_parser().subcommands[words[0]].parse_arguments([*words[1:], *marker, *pairs])
    files = [word for word in words[1:] if word in ("run", "a.mp4")]
    assert getattr(args, flag) == values
    assert model_and_files(args) == (("run", None), files[1:], pairs)


def test_data_speed_without_lists(capsys):
    assert code_of(["data", "speed", "--cfg", "quick/lara"]) == 2
    assert "DATA.PATH_TO_DATA_DIR is ''" in only_error(capsys)


def test_overrides_of_data_speed_after_a_list_of_values(capsys):
    assert main(["data", "speed", "--cfg", "quick/lara", "--workers", "0", "1", "VIT.DPTH", "2"])
    assert "did you mean VIT.DEPTH?" in only_error(capsys)


@pytest.mark.parametrize(
    "words",
    [
        ["run", "--cfg", "quick/lara"],
        ["predict", "run", "a.mp4"],
        ["swap", "run", "--landmarks", "8"],
        ["swap", "run", "--attentions", "lara"],
        ["export", "run", "out"],
        ["data", "speed", "--cfg", "quick/lara"],
    ],
    ids=lambda words: words[-2] if words[0] == "swap" else words[0],
)
def test_equals_sign_gets_a_hint(words, capsys):
    for key, value in (("VIT.DEPTH", "2"), ("VIT.KERNELS", "torch")):
        assert code_of([*words, f"{key}={value}"]) == 2
        assert f"write {key} {value}" in only_error(capsys)


def test_exit_code_of_a_command(capsys):
    assert main(["report", "."]) == 2
    assert " run" in only_error(capsys)


def test_program_without_the_console_script():
    for module, words in (
        ("slowfast_lara.cli", ["configs"]),
        ("benchmarks", ["roofline", "--crops", "32", "--landmarks", "8"]),
    ):
        code, stdout, stderr = finish(start(*words, program=("-m", module), folder=ROOT))
        assert (code, stderr) == (0, "") and len(stdout.splitlines()) > 5
