"""Import of users' modules, which register attentions and datasets of their own.

A module is imported only if the user names it, with `--import` or in the environment variable
SLOWFAST_LARA_IMPORT. A run records the names in its config (IMPORTS). Loading a config does not
import these modules, because a checkpoint's config may come from an untrusted source.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Iterable

from slowfast_lara.errors import InputError, first_line

# Environment variable with the files and modules to import, separated as in PATH. `--import` adds
# its arguments, so that child processes import them too.
VARIABLE = "SLOWFAST_LARA_IMPORT"
OWN_CODE = "--import FILE.py adds your own"


def imported() -> list[str]:
    """The files and modules in VARIABLE, in import order.

    After `import_user_code`, the paths of the files are absolute.
    """
    return [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]


def import_user_code(names: Iterable[str] = ()) -> None:
    """Import the files and modules in the environment variable VARIABLE and in `names`.

    Adds `names` to VARIABLE, so that child processes import them too.
    """
    done: list[str] = []
    for name in [*imported(), *names]:
        is_file = name.endswith(".py") or os.path.dirname(name) != ""
        done.append(os.path.abspath(os.path.expanduser(name)) if is_file else name)
        _import(done[-1], is_file)
    if done:
        os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys(done))


def _import(name: str, is_file: bool) -> None:
    module = name
    if is_file:
        if not os.path.isfile(name):
            raise InputError(f"--import {name}: no such file")
        folder, file = os.path.split(name)
        module = file.removesuffix(".py")
        if folder not in sys.path:
            # DataLoader workers that are not forked inherit sys.path, and import the module of the
            # dataset by name. Append: other files of the folder must not shadow installed packages.
            sys.path.append(folder)
    try:
        found = importlib.import_module(module).__file__
    except (Exception, SystemExit) as error:
        raise InputError(f"--import {name}: {_reason(error, module)}") from error
    if is_file and not (found and os.path.samefile(found, name)):
        raise InputError(f"--import {name}: another module is named {module}; rename the file")


def _reason(error: BaseException, module: str) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
        return f"no module {module!r} is installed; a file name must end with .py"
    frames = [x for x in traceback.extract_tb(error.__traceback__) if "importlib" not in x.filename]
    place = (error.filename, error.lineno) if isinstance(error, SyntaxError) else frames[-1][:2]
    return f"{type(error).__name__}: {first_line(error)} ({place[0]}, line {place[1]})"
