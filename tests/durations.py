"""Seconds of every test file, the longest first: ``python -m tests.durations build/tests.xml``.

``make test`` writes that file, so two runs can be compared. Setup and teardown count as the test's.
"""

from __future__ import annotations

import sys
from collections import Counter
from xml.etree import ElementTree


def main() -> None:
    seconds, tests = Counter[str](), Counter[str]()
    for case in ElementTree.parse(sys.argv[1]).iter("testcase"):
        # A class of tests would follow the module's name.
        module = [part for part in case.attrib["classname"].split(".") if part.islower()]
        file = "/".join(module) + ".py"
        seconds[file] += float(case.attrib["time"])
        tests[file] += 1
    for file, of_file in seconds.most_common():
        print(f"{of_file:8.1f} s {tests[file]:5d} tests  {file}")
    print(f"{seconds.total():8.1f} s {tests.total():5d} tests")


if __name__ == "__main__":
    main()
