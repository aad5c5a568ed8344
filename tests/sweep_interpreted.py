"""A sweep that takes its time, for a test that interrupts it: FILE and jobs as arguments."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

CASES = list(range(400))


def slow(case: int) -> dict[str, Any]:
    """A row a hundredth of a second."""
    time.sleep(0.01)
    return {"case": case, "text": "x" * 300}


def main() -> None:
    """Sweep; an interrupt is said as the command line says it."""
    from kvtool.errors import KvtoolError
    from kvtool.sweep import swept

    try:
        swept(CASES, slow, jobs=int(sys.argv[2]), path=Path(sys.argv[1]))
    except KvtoolError as error:
        print(error.code, error.message, error.hint, sep="\n", flush=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
