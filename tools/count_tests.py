#!/usr/bin/env python3
"""Counts tests for ./test: prints "PASSED FAILED".

  count_tests.py REPORT.json      of a GoogleTest report
  count_tests.py --run FILE.py    runs the unittest cases of FILE; the counts are the last line of the output

A skipped test is a failed one: nothing here may be skipped.
"""

import importlib.util
import json
import pathlib
import sys
import unittest


def of_report(path):
    passed = failed = 0
    for suite in json.loads(pathlib.Path(path).read_text())["testsuites"]:
        for case in suite["testsuite"]:
            if case["status"] != "RUN":
                continue  # left out by the filter
            if case.get("failures") or case["result"] != "COMPLETED":
                failed += 1
            else:
                passed += 1
    if passed + failed == 0:
        raise ValueError(f"{path}: no test has run")
    return passed, failed


def of_file(path):
    path = pathlib.Path(path).resolve()
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    suite = unittest.defaultTestLoader.loadTestsFromModule(module)
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(suite)
    bad = {id(test) for test, _ in result.failures + result.errors + result.skipped}
    bad |= {id(test) for test in result.unexpectedSuccesses}
    if result.testsRun == 0:
        raise ValueError(f"{path}: no test has run")
    return max(result.testsRun - len(bad), 0), len(bad)


def main():
    counts = of_file(sys.argv[2]) if sys.argv[1] == "--run" else of_report(sys.argv[1])
    sys.stdout.flush()
    print(*counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
