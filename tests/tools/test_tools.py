"""The programs of the library: doctor, bench and the examples."""

from __future__ import annotations

import collections
import importlib
import importlib.util
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from jaxconv import doctor
from jaxconv._src.library import native
from jaxconv._src.problem.spec import Op
from jaxconv.bench import __main__ as bench
from jaxconv.bench import (
    command_layers,
    compiled,
    environment,
    layers,
    measure,
    network_layers,
    networks,
    progress,
    report,
)
from jaxconv.bench.problem import Problem, Row, Side

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def run(*arguments: str, **options) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.run(
        [sys.executable, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        **options,
    )


def test_doctor_finds_nothing_broken(capsys, native_cpu):
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    assert "BROKEN" not in said and jax.__version__ in said
    for op in ("fprop", "dgrad", "wgrad"):
        assert re.search(rf"ok +{op} f32 highest: {op}_\w+, relative error", said), op
    assert re.search(r"ok +fprop int8: \w+, relative error 0", said), said


def test_doctor_counts_many_kernels(capsys, monkeypatch, native_cpu):
    monkeypatch.setattr(doctor, "_MOST_NAMES", 7)
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    assert "fprop: few_pixels 1, few_outputs 1, small_groups 1, onednn 8\n" in said
    assert "dgrad: small_groups_f32, onednn_f32," in said
    assert "`print(jaxconv.kernels())` lists them" in said


def test_doctor_reports_missing_kernels_and_still_succeeds(capsys, monkeypatch):
    refusal = native.Refusal("jaxconv[cpu]", "ImportError: taken away by a test")
    monkeypatch.setattr(native, "load", lambda name: refusal)
    monkeypatch.setattr(doctor, "_built", lambda name: False)
    assert doctor.main([]) == 0
    said = capsys.readouterr().out
    assert "missing" in said or "not built" in said


def test_bench_measures_a_layer_and_writes_what_it_found(tmp_path, capsys):
    out = tmp_path / "rows.json"
    arguments = ["--layer", "2,8,8,8,8,3,3,1,1", "--reps", "1", "--seconds", "0"]
    assert bench.main([*arguments, "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "geometric mean" in said
    report = json.loads(out.read_text())
    assert [row["op"] for row in report["rows"]] == ["fprop", "dgrad", "wgrad"]
    for row in report["rows"]:
        assert not row["wrong"] and row["jaxconv"]["median_s"] > 0 and row["lax"]["median_s"] > 0
        kernels = native.load("cuda" if jax.default_backend() == "gpu" else "cpu")
        if not isinstance(kernels, native.Refusal):
            assert row["kernel"] in kernels.kernels()


def test_bench_compiles_rows_ahead(tmp_path, monkeypatch):
    timing, compiling, beside = threading.Event(), collections.Counter(), []
    both, elapsed = compiled.compile_program, measure.elapsed

    def compile_program(library, prepared):
        compiling[threading.current_thread() is threading.main_thread()] += 1
        beside.append(timing.is_set())
        return both(library, prepared)

    def timed(*arguments):
        timing.set()
        try:
            return elapsed(*arguments)
        finally:
            timing.clear()

    monkeypatch.setattr(compiled, "compile_program", compile_program)
    monkeypatch.setattr(compiled, "_ROWS_PER_JOB", 1)  # two batches
    monkeypatch.setattr(measure, "elapsed", timed)
    out = tmp_path / "rows.json"
    arguments = ["--layer", "2,8,8,8,8,3,3,1,1", "--reps", "1", "--seconds", "0", "--dtype", "f32"]
    assert bench.main([*arguments, "--compile-jobs", "2", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["op"] for row in rows] == ["fprop", "dgrad", "wgrad"]
    for row in rows:
        for side in (row["jaxconv"], row["lax"]):
            assert side["median_s"] > 0 and side["error"] < 1e-5 and side["compile_s"] is None
    assert compiling == {False: 6} and not any(beside)


def test_both_layouts_share_what_does_not_depend_on_them(tmp_path, monkeypatch):
    """lax and the reference are compiled once for a layer, this library's kernels twice."""
    counted = collections.Counter()

    def count(name):
        inner = getattr(compiled, name)

        def called(*arguments):
            counted[name] += 1
            return inner(*arguments)

        monkeypatch.setattr(compiled, name, called)

    count("compile_program")
    count("reference_function")
    out = tmp_path / "rows.json"
    arguments = ["--layer", "2,8,8,32,32,3,3,1,1", "--layer", "2,6,6,32,32,1,1,1,0"]
    arguments += ["--dtype", "int8_nhwc", "int8_nchw32", "--compile-jobs", "2", "--reps", "1"]
    assert bench.main([*arguments, "--seconds", "0", "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 4 and all(
        row[side]["error"] == 0 for row in rows for side in ("jaxconv", "lax")
    )
    assert counted["compile_program"] == 2 * 3
    # Once ahead, and once for each row, which compiles it only if the earlier program fails.
    assert counted["reference_function"] == 2 + 4


def test_a_row_compiled_ahead_can_be_wrong(tmp_path, monkeypatch):
    ahead = compiled.norms
    monkeypatch.setattr(compiled, "norms", jax.jit(lambda y, r: ahead(y, -r)))
    arguments = ["--layer", "2,8,8,8,8,3,3,1,1", "--op", "fprop", "--reps", "1", "--seconds", "0"]
    assert bench.main([*arguments, "--compile-jobs", "2"]) == 1


def test_a_row_that_does_not_compile_ahead_says_so(tmp_path, capsys, monkeypatch):
    def refuse(*_):
        raise RuntimeError("out of registers")

    monkeypatch.setattr(compiled, "compile_one", refuse)
    arguments = ["--layer", "2,8,8,8,8,3,3,1,1", "--op", "fprop", "--compile-jobs", "2"]
    assert bench.main(arguments) == 1
    assert "jaxconv failed: RuntimeError: out of registers" in capsys.readouterr().out


def test_bench_goes_on_after_an_interruption(tmp_path, capsys, monkeypatch):
    out, asked = tmp_path / "rows.json", []

    def measured(problem, **options):
        if len(asked) == 2:
            raise KeyboardInterrupt
        asked.append(problem.op.value)
        row = measure.measure(problem, repetitions=1, seconds=0)
        row.sides["jaxconv"].error = None if asked == ["fprop", "dgrad"] else 0.0  # None: wrong
        return row

    monkeypatch.setattr(command_layers, "measure", measured)
    arguments = ["--layer", "2,8,8,8,8,3,3,1,1", "--dtype", "f32", "--json", str(out), "--resume"]
    assert bench.main(arguments) == progress.INTERRUPTED
    first = json.loads(out.read_text())["rows"]
    assert [row["op"] for row in first] == ["fprop", "dgrad"]
    asked.clear()
    asked.append("")
    assert bench.main(arguments) == progress.INTERRUPTED
    asked.clear()
    assert bench.main(arguments) == 0  # the second run measured dgrad
    assert asked == ["wgrad"]
    rows = json.loads(out.read_text())["rows"]
    assert rows[0] == first[0] and [row["op"] for row in rows] == ["fprop", "dgrad", "wgrad"]
    assert "2 rows are measured already" in capsys.readouterr().out

    out.write_text(out.read_text().replace(jax.__version__, "0.1"))
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert f"jax 0.1, now {jax.__version__}" in capsys.readouterr().err


def test_bench_says_what_auto_makes_of_native_rows():
    def row(name, left, ours, lax):
        made = Row(Problem(name, layers.parse("2,8,8,8,8,3,3,1,1"), Op.FPROP, "bf16"), "cuda")
        made.left_to_xla = left
        made.sides = {"jaxconv": Side(error=0.0, median_s=ours), "lax": Side(median_s=lax)}
        return made

    rows = [row("a", False, 1.0, 0.94), row("b", True, 1.0, 0.5), row("c", True, 1.0, 1.06)]
    lines = report.summary([*rows, row("d", False, 1.0, 1.2), row("e", True, 1.0, 1.04)])
    assert lines[:3] == [
        "algorithm auto leaves 3 of 5 rows to XLA",
        "under auto below 0.95x lax, 1: a fprop bf16 0.94x",
        "left to XLA though native is above 1.05x lax, 1: c fprop bf16 1.06x",
    ]


def test_times_of_the_bench_enter_the_table_of_measured_choices(tmp_path, capsys, monkeypatch):
    table, rows = tmp_path / "table.tsv", tmp_path / "rows.json"
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools"))
    tool = importlib.import_module("measured_times")
    table.write_text(tool.TABLE.read_text())
    tool.write(table, tool.read(table))
    assert table.read_text() == tool.TABLE.read_text()

    def row(op, kernel, ours, lax):
        made = Row(Problem("a", layers.parse("64,28,28,128,128,3,3,1,1"), op, "bf16"), "cuda")
        made.kernel = kernel
        made.sides = {"jaxconv": Side(error=0.0, median_s=ours), "lax": Side(median_s=lax)}
        return made.as_json()

    facts = {"device": "NVIDIA H200", "platform": "cuda", "clock": "the device's"}
    found = [row(Op.FPROP, "fprop_a", 2e-5, 3e-5), row(Op.DGRAD, "XLA", 4e-5, 4e-5)]
    rows.write_text(json.dumps({"environment": facts, "rows": found}))
    table.unlink()
    assert tool.main([str(rows), "--table", str(table)]) == 0
    found[0] = row(Op.FPROP, "fprop_b", 1e-5, 2.5e-5)
    rows.write_text(json.dumps({"environment": facts, "rows": found}))
    assert tool.main([str(rows), "--table", str(table)]) == 0
    key = "bf16:bf16:bf16 default b1 n64 g1 c128 k128 i28x28 f3x3 o28x28 s1x1 l1x1 d1x1 p1_1x1_1"
    assert table.read_text().splitlines() == [
        f"fprop {key}\t25\tfprop_b=10\tfprop_a=20",
        f"dgrad {key}\t40",
    ]
    rows.write_text(json.dumps({"environment": {**facts, "device": "NVIDIA A100"}, "rows": found}))
    with pytest.raises(SystemExit):
        tool.main([str(rows), "--table", str(table)])
    assert "NVIDIA A100" in capsys.readouterr().err


def test_bench_finds_the_layers_of_a_network():
    found = network_layers.layers_of("convnext_t", batch=2)
    assert found.left_out == 0
    assert list(map(str, found.layers.values()))[:3] == [
        "2x224x224 3->96 4x4 /4",
        "2x56x56 96->96 7x7 g96",
        "2x56x56 96->192 2x2 /2",
    ]
    assert len(found.layers) == 8  # of 22 convolutions
    assert network_layers.layers_of("wavenet").left_out == 31  # with padding on one side


def test_bench_leaves_out_what_xla_computes(tmp_path, monkeypatch, native_cpu):
    if environment.kernel_platform() != "cpu":
        pytest.skip("what is left to XLA on a GPU depends on the GPU")
    monkeypatch.setenv("JAXCONV_ALGORITHM", "auto")
    taken, left = "2,8,8,8,8,3,3,1,1", "1,1,1,8,8,1,1,1,0"
    arguments = ["--op", "fprop", "--dtype", "f32", "--reps", "1", "--seconds", "0"]
    out = tmp_path / "rows.json"
    layers_given = ["--layer", taken, "--layer", left]
    assert bench.main([*arguments, *layers_given, "--only-kernels", "--json", str(out)]) == 0
    assert [row["layer"] for row in json.loads(out.read_text())["rows"]] == [taken]


def test_progress_is_said_without_a_terminal(capsys, monkeypatch):
    clock = iter([0.0, 30.0, 60.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    found = progress.each(
        progress.Progress(3), ["a", "b", "c"], lambda i: f"row {i}", str.upper, lambda r: r
    )
    said = capsys.readouterr()
    assert found == ["A", "B", "C"] and said.out.split() == found
    assert said.err.splitlines() == [
        "[1/3] row a",
        "[2/3] row b (30 s, about 60 s left)",
        "[3/3] row c (60 s, about 30 s left)",
    ]


def test_random_layers_are_the_same_for_a_seed_and_dense():
    drawn = layers.random_layers(10, seed=3)
    assert drawn == layers.random_layers(10, seed=3) != layers.random_layers(10, seed=4)
    for text, layer in drawn.items():
        assert layers.parse(text) == layer
        assert layer.groups == 1 and layer.c % 8 == layer.k % 8 == 0


def test_bench_as_a_program(tmp_path):
    done = run("-m", "jaxconv.bench", "--list", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for name in (*layers.LAYERS, *networks.NETWORKS):
        assert name in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--layer", "1,2,3"],
        ["--layer", "1,4,4,2,2,9,9,1,0"],
        ["--layer", "1,4,4,3,4,3,3,1,1,2"],
        ["--set", "nothing"],
        ["--reps", "0"],
        ["--json", "/no/such/folder/out.json"],
        ["--plot", "out.txt"],
        ["--plot", "out.txt", "--network", "wavenet"],
        ["--size", "12", "--network", "unet"],
        ["--algorithm", "igemm_wgmma", "--network", "resnet50"],
        ["--device-time", "--seconds", "1"],
    ],
    ids=lambda a: " ".join(a),
)
def test_bench_refuses_what_it_cannot_read(arguments, capsys):
    with pytest.raises(SystemExit) as exited:
        bench.main(arguments)
    assert exited.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_bench_names_the_networks_that_there_are(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--network", "alexnet"])
    said = capsys.readouterr().err
    assert "alexnet" in said and all(name in said for name in networks.NETWORKS)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU has a clock of its own")
def test_bench_takes_device_times_only_from_a_gpu(capsys):
    with pytest.raises(SystemExit):
        bench.main(["--device-time"])
    assert "needs a GPU" in capsys.readouterr().err


def test_bench_measures_a_network_and_draws_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(networks.wavenet, "DILATIONS", (1, 2))
    out, figure = tmp_path / "networks.json", tmp_path / "networks.png"
    options = ["--size", "64", "--batch", "2", "--steps", "2", "--rounds", "2", "--verbose"]
    options += ["--fuse"]
    arguments = ["--network", "wavenet", *options, "--dtype", "f32", "--json", str(out)]
    assert bench.main([*arguments, "--plot", str(figure)]) == 0
    said = capsys.readouterr().out
    assert "train: geometric mean" in said and "infer: geometric mean" in said
    assert figure.stat().st_size > 1000
    rows = json.loads(out.read_text())["rows"]
    assert [row["mode"] for row in rows] == ["train", "infer"]
    for row in rows:
        assert row["shape"] == [2, 64, 256] and not row["wrong"] and row["difference"] < 1e-2
        # The first layer; the dilated layer, skip and residual of two blocks (the last has no
        # residual); the last two layers. The first layer needs no gradient of its input.
        assert row["convolutions"] == (8 if row["mode"] == "infer" else 8 + 8 + 7)
        assert row["on_kernels"] == sum(row["instances"].values())
        fused = row["fused_kernels"]
        assert fused["convolutions"] == row["convolutions"] and row["fused_difference"] < 1e-2
        for library in ("lax", "jaxconv", "fused"):
            side = row[library]
            assert 0 < side["least_s"] <= side["median_s"] <= side["most_s"]
            assert side["compile_s"] > 0 and side["memory_bytes"] > 0
            on_gpu = jax.default_backend() == "gpu"
            assert bool(side["device"]) == on_gpu and bool(side["kernels"]) == on_gpu
    if jax.default_backend() == "cpu":
        assert "not available on this platform" in said


def test_every_layer_parses_back_from_its_numbers():
    for name, layer in layers.LAYERS.items():
        numbers = [layer.n, *layer.spatial, layer.c, layer.k, *layer.window]
        numbers += [layer.stride[0], layer.padding[0], layer.groups, layer.dilation[0]]
        prefix = "" if layer.rank == 2 else f"{layer.rank}d:"
        assert layers.parse(prefix + ",".join(map(str, numbers))) == layer, name
    for name, layer_set in layers.SETS.items():
        assert layer_set.names and set(layer_set.names) <= set(layers.LAYERS), name


def test_the_training_example_learns(tmp_path):
    """Few epochs do not reach the example's 97 %, but the accuracy of lax's convolution."""
    for package in ("flax", "optax", "sklearn", "matplotlib", "tqdm"):
        pytest.importorskip(package, reason=f"the example needs {package}")
    done = run(
        str(REPOSITORY / "examples" / "train_cnn.py"),
        "--epochs",
        "5",
        "--plot",
        str(tmp_path / "curves.png"),
        cwd=tmp_path,
    )
    accuracies = dict(
        re.findall(r"^(jaxconv|lax) .*test accuracy ([\d.]+)%", done.stdout, re.MULTILINE)
    )
    assert set(accuracies) == {"jaxconv", "lax"}, done.stdout + done.stderr
    assert float(accuracies["jaxconv"]) > 85, done.stdout
    assert abs(float(accuracies["jaxconv"]) - float(accuracies["lax"])) < 3, done.stdout
    assert (tmp_path / "curves.png").stat().st_size > 1000


def test_the_training_example_learns_with_winograd(tmp_path):
    """Forward and backward; after few epochs, the same accuracy as lax's convolution."""
    for package in ("flax", "optax", "sklearn", "matplotlib", "tqdm"):
        pytest.importorskip(package, reason=f"the example needs {package}")
    options = ["--epochs", "2", "--dtype", "bf16", "--algorithm", "winograd_f4x4"]
    done = run(str(REPOSITORY / "examples" / "train_cnn.py"), *options, cwd=tmp_path)
    said = done.stdout + done.stderr
    kernels = re.search(r"^kernels of a training step: (.*)$", said, re.MULTILINE)
    assert kernels and kernels[1].count("fprop_winograd_bf16_4x4") == 3, said
    assert kernels[1].count("dgrad_winograd_bf16_4x4") == 2, said
    found = dict(re.findall(r"^(jaxconv|lax) .*test accuracy ([\d.]+)%", said, re.MULTILINE))
    assert float(found["jaxconv"]) > max(60, float(found["lax"]) - 5), said


def test_the_resnet_example_compares_loss_curves(monkeypatch, capsys):
    """Only two blocks, on small images, because the whole network takes minutes to compile."""
    for package in ("flax", "optax", "sklearn", "tqdm"):
        pytest.importorskip(package, reason=f"the example needs {package}")
    path = REPOSITORY / "examples" / "resnet50.py"
    spec = importlib.util.spec_from_file_location("resnet50_example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    monkeypatch.setattr(example, "STAGES", ((1, 1), (1, 2)))
    options = ["--fuse", "--steps", "24", "--batch-size", "4", "--size", "32", "--orders", "2"]
    monkeypatch.setattr(sys, "argv", ["resnet50.py", *options])
    assert example.main() == 0
    said = capsys.readouterr().out
    # The stem, and two blocks with a shortcut each. All but the stem have a data gradient.
    assert "26 of 26 convolutions on jaxconv's kernels; 9 with statistics" in said
    lax, other, far = (example.Run(np.full(20, float(at)), 1.0) for at in (1, 2, 9))
    assert not example.alike(lax, [other, other], far, "x")
    assert example.alike(lax, [other, far], far, "x")


def test_the_training_examples_plot_marks_what_is_equal(tmp_path, monkeypatch):
    for package in ("flax", "optax", "sklearn", "matplotlib", "tqdm"):
        pytest.importorskip(package, reason=f"the example needs {package}")
    import matplotlib.figure

    example = runpy.run_path(str(REPOSITORY / "examples" / "train_cnn.py"))
    losses = np.linspace(2, 1, 12)
    other = losses + np.where(np.arange(12) < 5, 0, 1e-3)
    ours = example["Run"](losses, np.array([0.5, 0.8, 0.98]), 1.0, [])
    theirs = example["Run"](other, np.array([0.5, 0.8, 0.97]), 1.0, [])
    figures = []
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda f, *_, **__: figures.append(f))
    example["plot"](ours, theirs, str(tmp_path / "plot.png"))
    top, middle, bottom = figures[0].axes
    smoothed = {line.get_label(): line.get_ydata() for line in top.lines}["jaxconv, 1.0 s"]
    np.testing.assert_allclose(smoothed[[0, 1, 11]], [2, losses[:2].mean(), losses[8:].mean()])
    assert [tuple(line.get_xdata()) for line in middle.lines[:2]] == [(4, 8, 12)] * 2
    marks = {line.get_label(): line.get_xdata() for line in bottom.lines}
    assert list(marks["equal to the last bit: 5 of 12 steps"]) == [1, 2, 3, 4, 5]


INT8_DTYPES = ["int8", "int8_nhwc", "int8_nchw32"]


def test_bench_measures_quantised_layers_exactly(tmp_path, capsys):
    out = tmp_path / "rows.json"
    # An image, a layer with one axis, and a depthwise layer.
    sizes = ("1,9,9,3,40,5,5,2,2", "1d:2,9,32,32,3,1,1", "1,4,4,8,8,3,3,1,1,8")
    layer_options = [option for size in sizes for option in ("--layer", size)]
    arguments = [*layer_options, "--dtype", *INT8_DTYPES, "--reps", "1", "--seconds", "0"]
    assert bench.main([*arguments, "--json", str(out)]) == 0
    said = capsys.readouterr().out
    assert "int8_nhwc: geometric mean over 3 rows" in said or jax.default_backend() == "gpu"
    rows = json.loads(out.read_text())["rows"]
    assert [row["dtype"] for row in rows] == [
        *INT8_DTYPES,
        *("int8", "int8_nhwc"),  # NCHW32 needs two axes
        *("int8", "int8_nhwc"),  # a group has less than 32 channels
    ]
    for row in rows:
        assert row["op"] == "fprop" and row["jaxconv"]["error"] == 0 and not row["wrong"]
        assert row["jaxconv"]["median_s"] > 0


def test_bench_measures_a_quantised_network(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(networks.resnet50, "STAGES", ((1, 1), (1, 2)))
    out, figure = tmp_path / "networks.json", tmp_path / "networks.png"
    options = ["--size", "32", "--batch", "2", "--steps", "2", "--rounds", "1", "--mode", "infer"]
    arguments = ["--network", "resnet50", "--int8", *options, "--dtype", "f32", "--json", str(out)]
    assert bench.main([*arguments, "--plot", str(figure)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"resnet50 infer in int8: [\d.]+x lax and [\d.]+x jaxconv in f32", said)
    assert figure.stat().st_size > 1000
    (row,) = json.loads(out.read_text())["rows"]
    assert 0 < row["int8_difference"] < 0.1 and row["int8_ratio"] > 0
    assert row["int8"]["median_s"] > 0 and row["int8"]["compile_s"] > 0
    assert row["int8_kernels"]["convolutions"] == 1 + 2 * 4 + 1 == row["convolutions"] + 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--network", "unet", "--int8"], "of resnet50 only"),
        (["--network", "resnet50", "--int8", "--mode", "train"], "inference only"),
    ],
)
def test_bench_refuses_networks_without_an_int8_form(arguments, message, capsys):
    with pytest.raises(SystemExit):
        bench.main(arguments)
    assert message in capsys.readouterr().err


def test_the_quantised_example_keeps_the_accuracy(tmp_path):
    """After few epochs; the example itself fails if int8 loses more than half a point."""
    for package in ("flax", "optax", "sklearn", "matplotlib", "tqdm"):
        pytest.importorskip(package, reason=f"the example needs {package}")
    example = str(REPOSITORY / "examples" / "int8_inference.py")
    done = run(example, "--epochs", "4", "--qat", cwd=tmp_path)
    said = done.stdout + done.stderr
    found = dict(re.findall(r"^(float32|int8|int8, QAT) +([\d.]+) +[\d.]+", done.stdout, re.M))
    assert set(found) == {"float32", "int8", "int8, QAT"}, said
    accuracies = {name: float(value) for name, value in found.items()}
    assert accuracies["float32"] > 90, said
    assert accuracies["int8"] > accuracies["float32"] - 1, said
    assert accuracies["int8, QAT"] > accuracies["float32"] - 1, said
    assert "DIFFER" not in said
