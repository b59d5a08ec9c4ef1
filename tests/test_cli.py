"""The command line, run in this process."""

import json
import subprocess
import sys
import types

import pytest

import jmoe
from jmoe import cli, machine, selftest
from jmoe.bench import BENCHES, common, module_name
from jmoe.bench.common import Record


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def run(capsys, *argv):
    """(exit status, standard output, standard error), with runs of white space as one blank."""
    status = cli.main(list(argv))
    captured = capsys.readouterr()
    return status, " ".join(captured.out.split()), " ".join(captured.err.split())


def test_without_a_command_it_lists_them_with_examples(capsys):
    status, out, _ = run(capsys)
    assert status == 0 and all(f"jmoe {word} " in out for word in ("explain", "doctor", "bench", "quantize"))


@pytest.mark.parametrize("command", cli.HELP)
def test_the_help_of_every_command_says_what_it_does_and_fits_a_terminal(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0 and f"usage: jmoe {command}" in text and "--help" in text
    described = text.split("\n\n")[1]  # after the usage
    assert len(described) > 60 and max(map(len, text.splitlines())) <= 104


def test_a_command_that_does_not_exist(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["benchmark"])
    assert end.value.code == 2 and "invalid choice: 'benchmark'" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"jmoe {jmoe.__version__}\n"


def test_python_dash_m_is_the_command():
    done = subprocess.run([sys.executable, "-m", "jmoe", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "explain" in done.stdout


# --- explain


def test_explain_a_named_shape_for_another_machine(capsys):
    status, out, _ = run(capsys, "explain", "gpt-oss-120b", "--machine", "h200", "--quant", "mxfp8", "--tokens", "64")
    assert status == 0
    for part in (
        "128 experts, top 4",
        "8, 16 experts and 64 tokens on each",
        "NVIDIA H200",
        "3008 = 2880 data",
        "On Blackwell",
    ):
        assert part in out


def test_explain_this_machine_with_flags_alone(capsys):
    flags = ["--hidden", "256", "--intermediate", "128", "--experts", "8", "--top-k", "2"]
    status, out, _ = run(capsys, "explain", *flags, "--devices", "4")
    assert status == 0 and "D 256, F 128, 8 experts, top 2" in out and "4 x cpu" in out and "nvlink_two_sided" in out
    status, out, _ = run(capsys, "explain", *flags, "--devices", "1")
    assert "one rank: nothing travels" in out


def test_explain_more_ranks_than_this_machine_has(capsys):
    status, out, _ = run(capsys, "explain", "tiny", "--devices", "16")
    assert status == 0 and "16 x cpu" in out and "16, 1 experts" in out


def test_explain_several_hosts(capsys):
    _, out, _ = run(capsys, "explain", "deepseek-v3", "--machine", "h200", "--devices", "32", "--hosts", "4")
    text = " ".join(out.split())
    assert "several processes or hosts (4 hosts)" in text and "> nvlink_one_sided" in text and "to hosts" in text
    assert "between 4 hosts, once for each (token, host)" in text


def test_explain_a_config_json_or_its_folder(capsys, tmp_path):
    config = {"model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_local_experts": 8,
              "num_experts_per_tok": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        status, out, _ = run(capsys, "explain", str(path), "--machine", "cpu", "--wire", "mxfp8", "--dtype", "float32")
        assert status == 0 and "D 64, F 128, 8 experts, top 2" in out and "wire='mxfp8' was asked for" in out


@pytest.mark.parametrize(
    "wrong", [{"hidden_act": [1]}, {"moe_intermediate_size": {}}, {"n_group": "x"}, {"routed_scaling_factor": {}}]
)
def test_an_entry_of_the_wrong_type_in_config_json_is_refused_in_words(capsys, tmp_path, wrong):
    config = {"model_type": "deepseek_v3", "hidden_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 8,
              "num_experts_per_tok": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config | wrong))
    status, _, err = run(capsys, "explain", str(tmp_path))
    assert status == 2 and "config.json holds an entry of the wrong type" in " ".join(err.split())


def test_explain_reads_from_config_json_what_the_weights_are_kept_in(capsys, tmp_path):
    config = {"model_type": "mixtral", "hidden_size": 256, "intermediate_size": 128, "num_local_experts": 8,
              "num_experts_per_tok": 2, "quantization_config": {"quant_method": "mxfp4"}}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    status, out, _ = run(capsys, "explain", str(tmp_path), "--machine", "h200")
    assert status == 0 and "weights E2M1 values, E8M0 scale per 32" in " ".join(out.split())
    status, out, _ = run(capsys, "explain", str(tmp_path), "--machine", "h200", "--weights", "none")
    assert status == 0 and "weights bfloat16, unquantised" in " ".join(out.split())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    status, _, err = run(capsys, "explain", str(tmp_path))
    assert status == 2 and "quant_method='awq' is not supported" in " ".join(err.split())


def test_explain_as_json(capsys):
    assert cli.main(["explain", "tiny", "--machine", "h200", "--devices", "2", "--quant", "fp8", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["num_ranks"] == 2 and data["chosen"]["decision"]["wire"] == "fp8_128"


@pytest.mark.parametrize(
    "argv, message",
    [
        (
            ["nonsense"],
            "'nonsense' is neither a file, nor a folder with a config.json, nor a named shape; named shapes are qwen3",
        ),
        (["--hidden", "64"], "--intermediate, --experts, --top-k are missing. Name a shape (qwen3-30b-a3b"),
        (["tiny", "--backend", "warp"], "'warp' is not known"),
        (
            ["tiny", "--quant", "int8", "--backend", "nvlink_one_sided", "--devices", "2"],
            "Backend 'nvlink_one_sided' was asked",
        ),
        (["tiny", "--devices", "0"], "--devices 0 must be at least 1"),
        (["tiny", "--hosts", "2"], "name it with --machine"),
        (["tiny", "--machine", "h200", "--hosts", "3"], "--hosts 3 for 8 devices; hosts must hold equally many"),
        (["gpt-oss-120b", "--quant", "fp8", "--machine", "h200"], "do not divide hidden_size=2880"),
    ],
)
def test_explain_refuses_in_a_sentence_and_not_with_a_traceback(capsys, argv, message):
    status, out, err = run(capsys, "explain", *argv)
    assert status == 2 and not out and message in err and err.startswith("jmoe explain: ")


def test_explain_refuses_files_that_are_no_configuration(capsys, tmp_path):
    for text, message in (
        ("{", "cannot be read as JSON"),
        ("[1]", "holds a list, not an object"),
        ("{}", "model_type"),
    ):
        (tmp_path / "config.json").write_text(text)
        status, _, err = run(capsys, "explain", str(tmp_path))
        assert status == 2 and message in err


# --- doctor (its findings, messages and exit statuses: tests/test_doctor.py)


def probes():
    """Answers of a machine without GPUs."""
    cpu = types.SimpleNamespace(platform="cpu", device_kind="cpu")
    return machine.Probes(
        python=lambda: "3.12.4",
        package={"jax": "0.11.2", "jaxlib": "0.11.2"}.get,
        nvidia_smi=lambda: "",
        devices=lambda platform: [cpu],
        mosaic=lambda: None,
        environ={},
    )


CASES = (
    selftest.Case("sharp", lambda: (30.0, "as it ran"), 26.0, 40.0),
    selftest.Case("blurred", lambda: (3.0, "as it ran"), 26.0, 40.0),
)


@pytest.mark.parametrize("cases, expected", [(CASES[:1], 0), (CASES, 1)])
def test_doctor_runs_the_self_test_and_exits_by_it(capsys, cases, expected):
    assert cli.run_doctor(probes=probes(), cases=cases) == expected
    out = " ".join(capsys.readouterr().out.split())
    assert "warning no GPU" in out and "ok sharp: 30.0 dB, must be 26 to 40 as it ran" in out
    assert ("failed blurred: 3.0 dB" in out) == ("1 self-test failed" in out) == bool(expected)
    assert cli.run_doctor(probes=probes(), cases=cases, as_json=True) == expected
    data = json.loads(capsys.readouterr().out)
    assert len(data["self_test"]) == len(cases) and data["status"] == expected
    assert data["findings"][0]["level"] == "warning" and data["kernels"][0]["runs"] is False


def test_doctor_without_its_self_test_computes_nothing(capsys):
    status, out, _ = run(capsys, "doctor", "--no-self-test")
    assert status == 0 and "Self-test" not in out and "Setup" in out


# --- bench


@pytest.fixture
def toy(monkeypatch):
    """A benchmark that measures nothing, in the place of `quantize`."""
    module = types.ModuleType("jmoe.bench.quantize")

    def figures(smoke, progress):
        progress.start(2)
        progress.step("one")
        progress.step("two")
        return [Record("mxfp8", "16x64", 100.0, "GB/s", ceiling=200.0, ceiling_name="copy", meaningful=not smoke)]

    module.run = figures
    monkeypatch.setitem(sys.modules, "jmoe.bench.quantize", module)
    return module


def test_bench_prints_and_writes(capsys, tmp_path, toy):
    out_json, out_png = tmp_path / "a.json", tmp_path / "a.png"
    status, out, _ = run(capsys, "bench", "quantize", "--smoke", "--json", str(out_json), "--plot", str(out_png))
    assert status == 0 and "mxfp8" in out and "GB/s time" in out and "100 (*)" in out and "50 %" in out
    name, (record,) = common.read_json(out_json)
    assert name == "quantize" and record.share == 0.5 and not record.meaningful and record.environment["jax"]
    assert out_png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize("width", [60, 80, 200])
def test_bench_prints_whole_words_and_figures_on_any_terminal(capsys, monkeypatch, toy, width):
    monkeypatch.setenv("COLUMNS", str(width))
    assert cli.main(["bench", "quantize", "--smoke"]) == 0
    out = capsys.readouterr().out
    assert "…" not in out and max(map(len, out.splitlines())) <= width
    for part in ("mxfp8", "16x64", "100", "GB/s", "50 %", "copy"):
        assert part in out


def test_bench_uses_the_modules_own_picture_and_tuning(capsys, tmp_path, toy):
    toy.plot = lambda records, path: open(path, "w").write(records[0].name)
    toy.tune = lambda progress: [Record("best tile", "16x64", 1.0, "us")]
    assert run(capsys, "bench", "quantize", "--plot", str(tmp_path / "p"))[0] == 0
    assert (tmp_path / "p").read_text() == "mxfp8"
    assert "best tile" in run(capsys, "bench", "quantize", "--tune")[1]


def test_bench_only_reaches_a_module_that_can_choose_and_is_refused_by_others(capsys, toy):
    status, _, err = run(capsys, "bench", "quantize", "--smoke", "--only", "mxfp8")
    assert status == 2 and "bench quantize takes no --only" in err
    asked = []
    toy.run = lambda smoke, progress, *, only=None: asked.append(only) or [Record("mxfp8", "16x64", 1.0, "us")]
    assert run(capsys, "bench", "quantize", "--only", "^mx.*64$")[0] == 0
    assert common.wanted(asked[0], "mxfp8", "16x64") and not common.wanted(asked[0], "nvfp4", "16x64")
    assert "not a regular expression" in run(capsys, "bench", "quantize", "--only", "(")[2]
    toy.tune = lambda progress, only=None: asked.append(only) or [Record("best tile", "16x64", 1.0, "us")]
    assert run(capsys, "bench", "quantize", "--tune", "--only", "mx")[0] == 0 and asked[-1].pattern == "mx"
    toy.tune = lambda progress: []
    assert "--tune takes no --only" in run(capsys, "bench", "quantize", "--tune", "--only", "mx")[2]
    toy.run = lambda smoke, progress, *, only=None: []
    status, _, err = run(capsys, "bench", "quantize", "--only", "zzz")
    assert status == 2 and "has no figure that --only 'zzz' fits" in err


def test_bench_compare(capsys, tmp_path):
    def write(name, value, bench="layer"):
        path = tmp_path / name
        common.write_json(path, bench, [Record("bf16", "T 64", value, "us", lower_is_better=True)])
        return str(path)

    a, b, c, d = write("a", 100.0), write("b", 120.0), write("c", 102.0), write("d", 1.0, "model")
    status, out, _ = run(capsys, "bench", "compare", a, b)
    assert status == 1 and "worse" in out and "0.83 x" in out
    assert run(capsys, "bench", "compare", b, a)[0] == 0
    assert "same" in run(capsys, "bench", "compare", a, c)[1]
    for words in ((a, c, "--threshold", "1"), ("--threshold", "1", a, c), (a, "--threshold", "1", c)):
        assert run(capsys, "bench", "compare", *words)[0] == 1
    with pytest.raises(SystemExit):
        cli.main(["bench", "compare", a, c, "--treshold", "1"])
    assert "unrecognized arguments: --treshold" in capsys.readouterr().err
    assert "compare two runs of the same" in run(capsys, "bench", "compare", a, d)[2]
    assert "takes two files, got 1" in run(capsys, "bench", "compare", a)[2]
    assert "there is no such file" in run(capsys, "bench", "compare", a, "missing.json")[2]


def test_bench_refuses(capsys, tmp_path, toy, monkeypatch):
    def refused(*argv):
        status, _, err = run(capsys, "bench", *argv)
        assert status == 2
        return err

    assert "no benchmark 'speed'; choose one of quantize, dispatch" in refused("speed")
    assert "takes no files" in refused("quantize", "a.json")
    assert "its folder does not exist" in refused("quantize", "--json", str(tmp_path / "no" / "a.json"))
    assert "nothing to tune" in refused("quantize", "--tune")
    monkeypatch.delitem(sys.modules, "jmoe.bench.quantize")
    monkeypatch.setitem(sys.modules, "jmoe.bench.quantize", None)
    assert "jmoe.bench.quantize is not part of this installation" in refused("quantize")


def test_every_benchmark_has_a_module_name():
    assert [module_name(b) for b in BENCHES][2] == "jmoe.bench.grouped_matmul"
