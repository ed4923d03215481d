"""The plugin of pytest that `record` loads by this module's name."""

import os
from typing import Any

from tpfuse.testing.faults.record import plugin


def pytest_configure(config: Any) -> None:
    """Adds the plugin."""
    config.pluginmanager.register(plugin(os.environ))
