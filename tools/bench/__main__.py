"""``python tools/bench``: ``python -m jaxconv.bench`` with additions of this repository.

The additions are columns for peers (``--peer torch cudnn``), rows for variants of Winograd (``--set
winograd``), ``--regret`` and ``--winograd-errors``.
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from bench_additions import main

if __name__ == "__main__":
    sys.exit(main())
