"""The pytest plugin that `record` loads by this module's name."""

import os
from typing import Any

from tpfuse.testing.faults.record import plugin


def pytest_configure(config: Any) -> None:
    """Register the plugin."""
    config.pluginmanager.register(plugin(os.environ))
