"""Exports the programs of ``exported_programs`` with the installed version of jaxconv.

    python tests/library/exported/make.py --platform cpu
    JAXCONV_TARGET=sm_90a python tests/library/exported/make.py --platform cuda

writes ``tests/library/exported/VERSION/PLATFORM_NAME.bin``. Programs for CUDA need no GPU. They
need an installation with the CUDA kernels, or ``--selection PROGRAM``: the compiled program of
``tests/cc/choices_test.cc``, which selects the same kernels.
"""

from __future__ import annotations

import argparse
import pathlib
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parents[1] / "support")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--platform", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--version", required=True, help="the commit that is installed")
    parser.add_argument("--selection", type=pathlib.Path, help="the compiled choices_test")
    options = parser.parse_args()
    if options.selection is not None:
        from selection_program import SelectionProgram

        sys.modules["_jaxconv.cuda"] = SelectionProgram(options.selection)

    import jax
    from exported_programs import programs

    import jaxconv

    folder = FOLDER / options.version
    folder.mkdir(exist_ok=True)
    for name, (function, arguments) in programs().items():
        exported = jax.export.export(
            jax.jit(function),
            platforms=[options.platform],
            disabled_checks=jaxconv.export.disabled_checks(),
        )(*arguments)
        (folder / f"{options.platform}_{name}.bin").write_bytes(exported.serialize())


if __name__ == "__main__":
    main()
