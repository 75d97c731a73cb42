"""Records the bits of exported CUDA programs' results on a GPU, beside the programs.

    python tests/library/exported/gpu_bits.py [FOLDER]

writes them into every version's folder, or below FOLDER.
"""

from __future__ import annotations

import hashlib
import json
import pathlib
import sys

import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import exported_programs

import jaxconv

FOLDER = pathlib.Path(__file__).parent
RECORD = "gpu_bits.json"


def digest(version: str, name: str) -> str:
    """A digest of all results of a program on the first GPU: types, shapes and bytes."""
    blob = bytearray((FOLDER / version / f"cuda_{name}.bin").read_bytes())
    _, arguments = exported_programs.programs()[name]
    with jax.default_device(jax.devices("gpu")[0]):
        results = jax.tree.leaves(jax.export.deserialize(blob).call(*arguments))
    found = hashlib.sha256()
    for result in map(np.asarray, results):
        found.update(f"{result.dtype} {result.shape}\n".encode())
        found.update(result.tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    jaxconv.register()
    out = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    for version in sorted({path.parent.name for path in FOLDER.glob("*/cuda_*.bin")}):
        names = exported_programs.programs()
        record = {
            "device": jax.devices("gpu")[0].device_kind,
            "digests": {name: digest(version, name) for name in names},
        }
        (out / version).mkdir(parents=True, exist_ok=True)
        (out / version / RECORD).write_text(json.dumps(record, indent=1) + "\n")
        print(version, record)


if __name__ == "__main__":
    main()
