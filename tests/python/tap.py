"""tap.py FILE: runs the unittest cases of a file and reports them in TAP, skips counted."""
import importlib.util
import os
import sys
import traceback
import unittest


class Tap(unittest.TestResult):
    def line(self, good, test, comment=""):
        name = test.id().replace("cases.", "").replace("#", "")
        print(f"{'ok' if good else 'not ok'} {self.testsRun} {name}{comment}", flush=True)

    def addSuccess(self, test):
        self.line(True, test)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.line(True, test, f" # SKIP {reason}")

    def addError(self, test, error):
        super().addError(test, error)
        for text in "".join(traceback.format_exception(*error)).splitlines():
            print("#", text)
        self.line(False, test)

    addFailure = addError


def main(path):
    try:
        import numpy  # noqa: F401
    except ImportError:
        print("1..0 # SKIP there is no numpy")
        return
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    spec = importlib.util.spec_from_file_location("cases", path)
    cases = importlib.util.module_from_spec(spec)
    sys.modules["cases"] = cases
    spec.loader.exec_module(cases)
    suite = unittest.defaultTestLoader.loadTestsFromModule(cases)
    print(f"1..{suite.countTestCases()}", flush=True)
    suite.run(Tap())


main(sys.argv[1])
