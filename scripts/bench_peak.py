"""Run a command and print, as JSON: seconds, CPU seconds, peak memory in MiB, and its output.

A process of its own, and a small one: Linux counts the memory of whoever starts a process as the first
peak of that process, so a large benchmark cannot measure a small command itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time


def main() -> None:
    """The command is what follows; its exit code becomes this one's."""
    with tempfile.TemporaryFile() as output:
        start = time.perf_counter()
        child = subprocess.Popen(sys.argv[1:], stdout=output, stdin=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read().decode()
    in_mib = 2**20 if sys.platform == "darwin" else 2**10
    told = {
        "wall_s": seconds,
        "cpu_s": usage.ru_utime + usage.ru_stime,
        "peak_mib": usage.ru_maxrss / in_mib,
        "output": text,
    }
    print(json.dumps(told))
    sys.exit(child.returncode)


if __name__ == "__main__":
    main()
