"""The record of a GPU run, since continuous integration has none: what ran, where, on what sources.

    python -m pytest -m gpu --record-gpu-report tests/gpu_report.json

``test_gpu_report.py`` compares the recorded hash with the sources of the checkout.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import pathlib
import re

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
PATH = REPOSITORY / "tests" / "gpu_report.json"
HASHED = ("cc/core", "cc/cuda", "cc/ffi")  # everything that ends up in the CUDA library


def sources_sha256(root: pathlib.Path = REPOSITORY) -> str:
    """Hash over relative path, length and bytes of every hashed file, in the order of the paths."""
    digest = hashlib.sha256()
    files = sorted(
        path.relative_to(root).as_posix()
        for folder in HASHED
        for path in (root / folder).rglob("*")
        if path.is_file()
    )
    for name in files:
        data = (root / name).read_bytes()
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def write(path: str, outcomes: dict[str, str]) -> None:
    """Writes the report from the outcomes, by test id, of a session on this machine's GPU.

    Raises:
        RuntimeError: there is no GPU, or no test ran on it.
    """
    import jax

    if jax.default_backend() != "gpu" or "passed" not in outcomes.values():
        raise RuntimeError(f"no GPU test passed here (backend {jax.default_backend()}): no report")
    device = jax.devices("gpu")[0]
    version = pathlib.Path("/proc/driver/nvidia/version")
    driver = version.read_text() if version.exists() else ""
    outcome = list(outcomes.values())
    report = {
        "sources_sha256": sources_sha256(),
        "gpu": f"{jax.device_count('gpu')} x {device.device_kind}",
        "driver": re.search(r"\d+\.[\d.]+|$", driver)[0] or "unknown",
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "passed": outcome.count("passed"),
        "failed": outcome.count("failed"),
        "skipped": outcome.count("skipped"),
        "tests": sorted(outcomes),
    }
    pathlib.Path(path).write_text(json.dumps(report, indent=1) + "\n")
