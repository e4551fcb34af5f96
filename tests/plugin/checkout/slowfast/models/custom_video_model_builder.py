"""The module of a checkout for custom models."""

import slowfast_lara.plugin  # noqa: F401
