"""``python tools/bench``: ``python -m jaxconv.bench``, and what only this repository has.

That is further columns (``--peer torch cudnn``), the variants of Winograd in rows of their own
(``--set winograd``), ``--regret`` and ``--winograd-errors``.
"""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from bench_additions import main

if __name__ == "__main__":
    sys.exit(main())
