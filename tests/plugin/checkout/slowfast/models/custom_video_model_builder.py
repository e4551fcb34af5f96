"""The place that a checkout has for models of others."""

import slowfast_lara.plugin  # noqa: F401
