"""What a compaction costs at several contexts: `python benchmarks/compaction.py [-m MODEL] [--ctx N,N] [--output csv]`.

The same as `ds4 bench compaction`, with all its flags. Every compaction is verified before a figure is printed: the
next logits must be those of a session that evaluated the same tokens from nothing, bit for bit.
"""

from __future__ import annotations

import sys

from ds4 import cli

if __name__ == "__main__":
    sys.exit(cli.main(["bench", "compaction", *sys.argv[1:]]))
