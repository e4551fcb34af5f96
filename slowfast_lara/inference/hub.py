"""Models on the Hugging Face Hub: download and upload of folders.

huggingface_hub reads the user's token; this module never passes, prints or stores the token.
"""

from __future__ import annotations

import glob
import os
import re

from slowfast_lara.errors import InputError, RunError, first_line
from slowfast_lara.lazy import check_installed

SCHEME = "hf://"
_REPOSITORY = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
# Download only the files that `load` reads. Models without safetensors files have _OLD_WEIGHTS.
_FILES = ["*.json", "*.safetensors"]
_OLD_WEIGHTS = "pytorch_model.bin"


def download(address: str, revision: str | None = None) -> str:
    """Download the model at hf://USER/MODEL to the cache of huggingface_hub; return its folder.

    Args:
        address: the address of a model.
        revision: a branch, tag or commit; default: the main branch.
    """
    repository = check_repository(address.removeprefix(SCHEME))
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(repository, revision=revision, allow_patterns=_FILES)
        if not glob.glob(os.path.join(glob.escape(folder), "*.safetensors")):
            snapshot_download(repository, revision=revision, allow_patterns=_OLD_WEIGHTS)
        return folder
    except Exception as error:  # network or authentication error, unknown repository or revision
        raise InputError(f"cannot download {address}: {first_line(error)}") from None


def push(folder: str, repository: str) -> str:
    """Upload a folder to a repository, which is created as private if it does not exist.

    Returns:
        The address of the model.
    """
    check_repository(repository)
    from huggingface_hub import HfApi

    try:
        api = HfApi(library_name="slowfast_lara")
        api.create_repo(repository, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Export from slowfast_lara"
        )
    except Exception as error:  # network or authentication error, rejected repository name
        raise RunError(f"cannot push to {repository}: {first_line(error)}") from None
    return SCHEME + repository


def check_repository(name: str) -> str:
    """Return `name`; InputError if it is not USER/MODEL, or huggingface_hub is not installed."""
    if not _REPOSITORY.fullmatch(name):
        raise InputError(f"repository is {name!r:.100}; must be USER/MODEL")
    check_installed("huggingface_hub", "hf")
    return name
