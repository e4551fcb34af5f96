"""Deprecation warnings for moved or renamed public names and config keys.

Policy: a deprecated public name works for two minor versions after the release that deprecates
it. A name deprecated in 0.2 works in 0.3 and 0.4 and is removed in 0.5.
"""

from __future__ import annotations

import functools
import warnings


@functools.cache  # warn once per name and process
def deprecated(old: str, new: str, removed_in: str) -> None:
    """Warn that a name is deprecated.

    Call this in the body of a deprecated function or module, or where a deprecated config key is
    read. The warning points to the code that calls the function or imports the module.
    """
    message = f"{old} is deprecated and will be removed in {removed_in}; use {new}"
    warnings.warn(message, FutureWarning, stacklevel=3)
