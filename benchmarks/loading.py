"""What opening a model costs by step: `python benchmarks/loading.py [MODEL ...]` (default: all that are pulled).

Each model in a process of its own, best of three; resident memory after a prefill of 1000 tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

from ds4 import models

STEPS = """
import json, os, sys, time
import ds4
from ds4 import families, files, models, tokenizer
path, found = models.resolve(sys.argv[1]), {}
def step(name, do):
    start = time.perf_counter()
    result = do()
    found[name] = time.perf_counter() - start
    return result
with step("open", lambda: files.open_checkpoint(path)) as checkpoint:
    spec = step("options", lambda: families.model_spec(checkpoint))
    step("tokenizer", lambda: tokenizer.load(checkpoint))
    step("fingerprint", lambda: checkpoint.fingerprint(spec))
engine = step("engine, all of it", lambda: ds4.Engine(path, pool_tokens=4096))
with engine.session() as s:
    s.eval(list(range(1000, 2000)))
    statm = "/proc/self/statm"
    resident = int(open(statm).read().split()[1]) * os.sysconf("SC_PAGE_SIZE") if os.path.exists(statm) else 0
    print(json.dumps({"seconds": found, "resident": resident, "rows": s.bytes_held, "file": os.path.getsize(path)}))
"""


def measure(model: str) -> dict[str, object]:
    runs = [json.loads(subprocess.check_output([sys.executable, "-c", STEPS, model])) for _ in range(3)]
    return min(runs, key=lambda run: run["seconds"]["engine, all of it"])


def main(arguments: list[str]) -> None:
    for model in arguments or [name for name in models.names() if models.load(name).present]:
        found = measure(model)
        steps = ", ".join(f"{name} {seconds:.3f}" for name, seconds in found["seconds"].items())
        sizes = ", ".join(f"{name} {found[name] / 1e6:.0f}" for name in ("resident", "file", "rows"))
        print(f"{model}: seconds: {steps}; MB: {sizes}")


if __name__ == "__main__":
    os.environ.pop("DS4_CORE", None)
    main(sys.argv[1:])
