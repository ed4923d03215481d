"""The pytest plugin of a step of `benchmarks.apart`: each test is a row, and is begun as one."""

import pytest

from benchmarks.apart import Later, Row, Rows


class Reported:
    """A plugin that keeps a row for each test and runs those without a row; later: there was no time for all."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._found: Row = {}
        self.later = False

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self._rows.done]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        try:
            self._rows.begin(item.nodeid)
        except Later:
            self.later = True
            pytest.exit("no time left")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            self._found = {"outcome": "passed", "passed": True, "seconds": 0.0}
        self._found["seconds"] += report.duration
        if report.outcome == "skipped":
            self._found |= {"outcome": "skipped", "why": str(report.longrepr)[-300:]}
        elif report.outcome == "failed":
            text = "\n".join(report.longreprtext.splitlines()[-12:])
            self._found |= {"outcome": "failed", "passed": False, "error": text}
        if report.when == "teardown":
            self._rows.write(report.nodeid, self._found)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._rows.write(report.nodeid, {"error": "\n".join(report.longreprtext.splitlines()[-12:])})
