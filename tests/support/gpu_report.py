"""The record of a GPU run, because CI has no GPU: what ran, where, on which sources.

    python -m pytest -m gpu --record-gpu-report tests/gpu_report.json

records the outcome of every test marked ``gpu``. The fuzz (``gpu_fuzz.py --record PATH``) and other
tools add a summary of their own:

    python tests/support/gpu_report.py tests/gpu_report.json memcheck '{"failed": 0}'

Runs on the same sources, commit and machine are merged into the record; any other run replaces it.
Without git, the commit is read from $JAXCONV_COMMIT. ``test_gpu_report.py`` compares the record
with the checkout.
"""

from __future__ import annotations

import collections
import datetime
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
PATH = REPOSITORY / "tests" / "gpu_report.json"
HASHED = ("cc/core", "cc/cuda", "cc/ffi")  # everything that ends up in the CUDA library
WATCHED = ("jaxconv", "tests")  # changes here are listed, not refused
ORIGIN = ("sources_sha256", "commit", "gpu", "driver", "jax")  # equal for all results in a record
OUTCOMES = ("passed", "failed", "skipped")
GPUS = "gpus_of_the_tests"  # how many of the machine's GPUs ran tests
SLOWEST, SLOWEST_COUNT = "slowest_seconds", 12  # of tests that run beside other tests


# C++ and CUDA sources, and a pattern for their strings and comments.
_CXX = (".h", ".cc", ".cu", ".cuh", ".def")
_STRING_OR_COMMENT = re.compile(rb'("(?:\\.|[^"\\\n])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)


def _without_layout(data: bytes) -> bytes:
    """A C++ source without its comments and white space, which do not affect a kernel."""
    parts = _STRING_OR_COMMENT.split(data)  # alternately code, and strings (None: a comment)
    return b"".join(p or b"" if i % 2 else b"".join(p.split()) for i, p in enumerate(parts))


def sources_sha256(
    root: pathlib.Path = REPOSITORY, folders: tuple[str, ...] = HASHED, names: str = "*"
) -> str:
    """A hash of the path, length and content of every hashed file, in the order of paths.

    Comments and white space of C++ and CUDA sources do not count.
    """
    digest = hashlib.sha256()
    files = sorted(
        path.relative_to(root).as_posix()
        for folder in folders
        for path in (root / folder).rglob(names)
        if path.is_file()
    )
    for name in files:
        data = (root / name).read_bytes()
        if name.endswith(_CXX):
            data = _without_layout(data)
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()


def _git(*arguments: str) -> subprocess.CompletedProcess:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def commit() -> str:
    """The commit of this checkout.

    Raises:
        RuntimeError: there is neither a git repository nor $JAXCONV_COMMIT.
    """
    if named := os.environ.get("JAXCONV_COMMIT"):
        return named
    found = _git("rev-parse", "HEAD")
    if found.returncode:
        raise RuntimeError(f"set JAXCONV_COMMIT to the commit of these sources: {found.stderr}")
    return found.stdout.strip()


def changed_since(recorded: str) -> str:
    """The files of jaxconv/ and tests/ that differ from the recorded commit, as text."""
    if _git("cat-file", "-e", f"{recorded}^{{commit}}").returncode:
        return f"this clone does not have the recorded commit {recorded}, changes are unknown"
    difference = _git("diff", "--name-only", recorded, "--", *WATCHED).stdout.split()
    files = [name for name in difference if name != PATH.relative_to(REPOSITORY).as_posix()]
    listed = "".join(f"\n  {name}" for name in files) or " nothing"
    return f"changed in {' and '.join(WATCHED)} since the recorded commit {recorded[:12]}:{listed}"


def _split(test_id: str) -> tuple[str, str, str]:
    """The file, the function and the parameters of a test id."""
    file, _, rest = test_id.partition("::")
    function, _, parameters = rest.partition("[")
    return file, function, parameters.removesuffix("]")


def _group(outcomes: dict[str, tuple[str, str]]) -> dict:
    """Groups as {file: {function: {"passed" or "skipped: reason": [parameters]}}}, sorted."""
    grouped: dict = collections.defaultdict(lambda: collections.defaultdict(dict))
    for test_id, (outcome, reason) in sorted(outcomes.items()):
        file, function, parameters = _split(test_id)
        label = f"{outcome}: {reason}" if reason else outcome
        grouped[file][function].setdefault(label, []).append(parameters)
    return {
        file: {name: dict(sorted(labels.items())) for name, labels in functions.items()}
        for file, functions in grouped.items()
    }


def outcomes(report: dict) -> dict[str, tuple[str, str]]:
    """(outcome, reason) by test id: the inverse of ``_group``."""
    found = {}
    for file, functions in report.get("tests", {}).items():
        for function, labels in functions.items():
            for label, each in labels.items():
                outcome, _, reason = label.partition(": ")
                for parameters in each:
                    suffix = f"[{parameters}]" if parameters else ""
                    found[f"{file}::{function}{suffix}"] = (outcome, reason)
    return found


def _text(value, indent: str = "") -> str:
    """JSON with one entry on each line, and lists filled to 100 columns."""
    inner = indent + " "
    if isinstance(value, dict) and value:
        entries = [f"{inner}{json.dumps(k)}: {_text(v, inner)}" for k, v in value.items()]
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    if isinstance(value, list) and value:
        lines = [""]
        for item in map(json.dumps, value):
            if lines[-1] and len(inner) + len(lines[-1]) + len(item) + 3 > 100:
                lines.append("")
            lines[-1] += (" " if lines[-1] else "") + item + ","
        return "[\n" + "\n".join(inner + line for line in lines).removesuffix(",") + f"\n{indent}]"
    return json.dumps(value)


def _origin() -> dict[str, str]:
    import jax

    if jax.default_backend() != "gpu":
        raise RuntimeError(f"no GPU here (backend {jax.default_backend()}): no report")
    version = pathlib.Path("/proc/driver/nvidia/version")
    driver = version.read_text() if version.exists() else ""
    return {
        "sources_sha256": sources_sha256(),
        "commit": commit(),
        "gpu": f"{jax.device_count('gpu')} x {jax.devices('gpu')[0].device_kind}",
        "driver": re.search(r"\d+\.[\d.]+|$", driver)[0] or "unknown",
        "jax": jax.__version__,
    }


def update(
    path: str | pathlib.Path,
    session: dict[str, tuple[str, str]],
    seconds: dict[str, float] | None = None,
    gpu_count: int = 0,
    **summaries: dict,
) -> None:
    """Merges a session's outcomes, (outcome, reason) by test id, and summaries into the report.

    The report keeps the longest of the tests' ``seconds``, given by test id. ``gpu_count`` is the
    number of GPUs over which the tests were distributed.

    Raises:
        RuntimeError: there is no GPU, or the commit is not known.
        ValueError: a summary does not count failures.
    """
    for name, summary in summaries.items():
        if not isinstance(summary.get("failed"), int):
            raise ValueError(f'{name}: expected a number "failed", got {summary}')
    origin = _origin()
    path = pathlib.Path(path)
    old = json.loads(path.read_text()) if path.exists() else {}
    if any(old.get(key) != value for key, value in origin.items()):
        old = {}
    merged = outcomes(old) | session
    counts = collections.Counter(outcome for outcome, _ in merged.values())
    ours = ("tests", SLOWEST)
    kept = {key: value for key, value in old.items() if isinstance(value, dict) and key not in ours}
    times = old.get(SLOWEST, {}) | {name: round(each) for name, each in (seconds or {}).items()}
    slowest = sorted(times.items(), key=lambda item: (-item[1], item[0]))[:SLOWEST_COUNT]
    report = {
        **origin,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        **{outcome: counts[outcome] for outcome in OUTCOMES},
        **({GPUS: most} if (most := max(gpu_count, old.get(GPUS, 0))) else {}),
        **({SLOWEST: dict(slowest)} if slowest else {}),
        **dict(sorted((kept | summaries).items())),
        "tests": _group(merged),
    }
    path.write_text(_text(report) + "\n")


if __name__ == "__main__":
    update(sys.argv[1], {}, **{sys.argv[2]: json.loads(sys.argv[3])})
