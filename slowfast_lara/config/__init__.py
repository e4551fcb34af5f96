"""The config tree: PySlowFast's, plus our nodes; loading and checking."""

from slowfast_lara.config.defaults import get_cfg
from slowfast_lara.config.load import load_config
from slowfast_lara.config.validate import check_machine

__all__ = ["check_machine", "get_cfg", "load_config"]
