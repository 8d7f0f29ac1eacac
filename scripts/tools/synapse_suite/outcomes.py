"""Runs test modules under trial and writes the outcome of each test.

    python -m scripts.tools.synapse_suite.outcomes FILE NAME...

When a test ends, a line of JSON with its id and outcome is written, so that the
outcomes are not lost if a module hangs. SIGABRT makes the process print where it hangs.

The program is run with ``python -m`` for stock Synapse, and with ``synapse-replication
exec -m`` for this package, in the folder of the homeserver's tests. It does not import
this package, which must not be imported before ``exec`` has replaced the host's names.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from typing import Any, TextIO

from twisted.trial.reporter import TreeReporter
from twisted.trial.runner import TestLoader, TrialRunner
from typing_extensions import override

SUCCESS = "success"
SKIP = "skip"
EXPECTED_FAILURE = "todo"


class OutcomeReporter(TreeReporter):
    """A reporter of trial that writes the outcome of each test by its id.

    For a test with several outcomes, such as a success and an error of its cleanup, the
    first one that is not a success is written. Outcomes that do not belong to a running
    test, such as an import error, are written at the end.

    :ivar output: the file to write to; set before the tests are run.
    """

    output: TextIO

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._outcomes: dict[str, str] = {}

    def _record(self, test: Any, outcome: str) -> None:
        if self._outcomes.get(test.id(), SUCCESS) == SUCCESS:
            self._outcomes[test.id()] = outcome

    @override
    def stopTest(self, test: Any) -> None:
        super().stopTest(test)
        self._write_outcomes()

    @override
    def done(self) -> None:
        super().done()
        self._write_outcomes()

    def _write_outcomes(self) -> None:
        for line in self._outcomes.items():
            self.output.write(json.dumps(line) + "\n")
        self.output.flush()
        self._outcomes.clear()

    @override
    def addSuccess(self, test: Any) -> None:
        super().addSuccess(test)
        self._record(test, SUCCESS)

    @override
    def addFailure(self, test: Any, fail: Any) -> None:
        super().addFailure(test, fail)
        self._record(test, "failure")

    @override
    def addError(self, test: Any, error: Any) -> None:
        super().addError(test, error)
        self._record(test, "error")

    @override
    def addSkip(self, test: Any, reason: Any) -> None:
        super().addSkip(test, reason)
        self._record(test, SKIP)

    @override
    def addExpectedFailure(self, test: Any, failure: Any, todo: Any = None) -> None:
        super().addExpectedFailure(test, failure, todo)
        self._record(test, EXPECTED_FAILURE)

    @override
    def addUnexpectedSuccess(self, test: Any, todo: Any = None) -> None:
        super().addUnexpectedSuccess(test, todo)
        self._record(test, "unexpected success")


def main(arguments: list[str]) -> int:
    """Run the tests; return 0, even if tests fail."""
    path, *names = arguments
    faulthandler.enable()
    with open(path, "w", encoding="utf-8") as output:

        def make(*args: Any, **kwargs: Any) -> OutcomeReporter:
            reporter = OutcomeReporter(*args, **kwargs)
            reporter.output = output
            return reporter

        runner = TrialRunner(
            make, workingDirectory=f"{path}.trial", realTimeErrors=True
        )
        runner.run(TestLoader().loadByNames(names, recurse=True))
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    # Threads that tests left behind must not keep the process: some versions of the
    # homeserver leave those of their pools.
    os._exit(status)
