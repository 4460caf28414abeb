"""Opens every file or folder named on standard input as a hostile model; prints one JSON line each: what came of it.

Runs in a process of its own, with the address space limited to what it has after the imports plus a few hundred MB, so
that a giant allocation is a MemoryError here and not a dead machine. `python open_all.py MEGABYTES < paths`
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time

from ds4.errors import Ds4Error
from ds4.families import model_spec
from ds4.files import open_checkpoint
from fuzz.common import limit_memory


def load_all(path: str) -> str:
    """Everything that is done with a stranger's model before it computes; returns the step that was reached."""
    with open_checkpoint(path) as checkpoint:
        if "tokenizer" not in os.path.basename(os.path.dirname(path)):
            spec = model_spec(checkpoint)
            checkpoint.fingerprint(spec)
            return "fingerprint"
        from ds4 import tokenizer

        tokenizer.load(checkpoint)
        return "tokenizer"


def main() -> None:
    paths = sys.stdin.read().splitlines()
    if importlib.util.find_spec("ds4.tokenizer"):
        import ds4.tokenizer  # noqa: F401  (its memory counts before the limit)
    limit_memory(int(sys.argv[1]))
    for path in paths:
        start = time.perf_counter()
        try:
            result = {"error": None, "message": f"passed {load_all(path)}"}
        except Ds4Error as error:
            result = {"error": "Ds4Error", "kind": type(error).__name__, "message": str(error)}
        except Exception as error:
            result = {"error": type(error).__name__, "message": str(error)}
        print(json.dumps({"path": path, "seconds": time.perf_counter() - start, **result}), flush=True)


if __name__ == "__main__":
    main()
