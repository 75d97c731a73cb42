"""Compiles training steps of the bench's networks for a GPU and counts moved bytes.

    python tools/network_bytes.py                    ResNet-50 in both spellings, MobileNetV2
    python tools/network_bytes.py --gpu h200         the same for an H200, without a GPU
    python tools/network_bytes.py --network efficientnet_b0 --batch-norm product --library lax
    python tools/network_bytes.py --hlo step.txt     a program's text that was saved before

Prints for each program: GB by category of kernel, according to XLA's optimised text (each operand
and each result counts once); the sum outside convolutions and products; the custom calls by name;
memory for temporaries; with ``--largest`` the largest kernels. ``--save FOLDER`` keeps the texts.
The programs are compiled but not run. For a GPU that is not here, XLA measures no kernels
(``jaxconv.bench.described_gpu``); convolutions and products that are XLA's may then differ.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import sys
import time
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import jax

import jaxconv
from jaxconv.bench import described_gpu, environment, hlo
from jaxconv.bench.measure_network import DTYPES, FUSED, LIBRARIES, MODES, Run, function
from jaxconv.bench.networks import NETWORKS, programs
from jaxconv.bench.networks.blocks import PASSES

# The default networks, with their spelling of batch normalisation.
USUAL = (("resnet50", "centred"), ("resnet50", "product"), ("mobilenet_v2", "product"))
BATCH = 256


def compiled(run: Run, library: str, gpu: str = "") -> tuple[jax.stages.Compiled, float]:
    """Compiles the program of a run, in training with donated state; returns it and the seconds.

    It is compiled for JAX's default device, or for a GPU of ``described_gpu.DESCRIPTIONS``.
    """
    network, train = NETWORKS[run.name], run.mode == "train"

    def arguments():
        state = programs.initial_state(network, run.input, run.seed)
        state = state if train else state._replace(velocity=[])
        target = programs.random_examples(network, run.shape, run.input.dtype).target
        return state, programs.Examples(run.input, target) if train else run.input

    shapes = jax.eval_shape(arguments)
    if gpu:
        shapes = described_gpu.types_on(described_gpu.described(gpu)[0], shapes)
    start = time.perf_counter()
    with jaxconv.override(library != "lax"):
        step = jax.jit(function(run, library), donate_argnums=0 if train else ())
        made = step.lower(*shapes).compile()
    return made, time.perf_counter() - start


def report(text: str, largest: int = 0) -> list[str]:
    """A report of the bytes that a program moves, as lines."""
    found = list(hlo.kernels(hlo.parse(text)))
    lines = [
        f"  {name:46s} {total.count:5d} {total.bytes / 1e9:9.3f} GB"
        for name, total in hlo.totals(found).items()
    ]
    everything = sum(kernel.bytes for kernel in found)
    outside = hlo.outside(found)
    calls = collections.Counter(k.kind for k in found if k.kind.startswith("jaxconv_"))
    said = ", ".join(f"{name.removeprefix('jaxconv_')} {n}" for name, n in sorted(calls.items()))
    lines += [
        f"  {len(found)} kernels, {everything / 1e9:.3f} GB; outside convolutions and products "
        f"{outside / 1e9:.3f} GB",
        f"  custom calls: {said or 'none'}",
    ]
    for kernel in sorted(found, key=lambda k: -k.bytes)[:largest]:
        lines.append(
            f"  {kernel.bytes / 1e6:9.1f} MB, read {kernel.read / 1e6:8.1f}, written "
            f"{kernel.written / 1e6:8.1f}  {kernel.kind}  {kernel.name}"
        )
    return lines


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = made.add_argument
    add("--network", nargs="+", choices=NETWORKS, metavar="NAME", help="of the bench")
    add("--batch-norm", nargs="+", choices=PASSES, default=list(PASSES), help="default: both")
    add("--library", choices=(*LIBRARIES, FUSED), default=FUSED)
    add("--mode", choices=MODES, default="train")
    add("--batch", type=int, default=BATCH)
    add("--size", type=int, help="extent of every spatial axis (default: usual)")
    add("--dtype", choices=DTYPES, default="bf16")
    add("--gpu", choices=described_gpu.DESCRIPTIONS, default="", help="default: this machine's")
    add("--largest", type=int, default=0, help="list so many kernels")
    add("--save", type=pathlib.Path, metavar="FOLDER", help="write the programs' texts there")
    add("--hlo", type=pathlib.Path, metavar="FILE", help="count the bytes of this text")
    return made


def main(argv: Sequence[str]) -> int:
    """Prints the bytes that programs move; returns 1 if one does not compile."""
    options = _parser().parse_args(argv)
    if options.hlo:
        print("\n".join(report(options.hlo.read_text(), options.largest)))
        return 0
    chosen = USUAL
    if options.network:
        chosen = [(name, norm) for name in options.network for norm in options.batch_norm]
    facts = environment.describe()
    print("\n".join(f"{name}: {value}" for name, value in facts.items()))
    failed = False
    for name, norm in chosen:
        shape = programs.input_shape(NETWORKS[name], options.batch, options.size)
        run = Run(name, options.mode, shape, options.dtype, batch_norm=norm)
        title = f"{name} {options.mode} {options.dtype} N={options.batch}, batch norm {norm}"
        print(f"\n{title}, {options.library}", flush=True)
        try:
            made, seconds = compiled(run, options.library, options.gpu)
        except Exception as error:  # for example out of memory; goes on with the next program
            print(f"  {type(error).__name__}: {str(error).splitlines()[0]}")
            failed = True
            continue
        text = made.as_text()
        if options.save:
            options.save.mkdir(parents=True, exist_ok=True)
            file = f"{name}_{norm}_{options.mode}_{options.library}.txt"
            (options.save / file).write_text(text)
        print("\n".join(report(text, options.largest)))
        if memory := made.memory_analysis():
            print(f"  temporaries {memory.temp_size_in_bytes / 1e9:.3f} GB; {seconds:.1f} s")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
