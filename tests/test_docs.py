"""The documentation does what it says: code blocks run, commands parse, links lead somewhere, figures are in step.

The Python blocks of a page are one program, run in a process of its own on four virtual CPU devices. Lines keep their
numbers, so that a traceback points into the page.
"""

import ast
import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jmoe import cli, compat
from jmoe.bench import common

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def program(text):
    """The Python blocks of a page, at the lines where they stand."""
    lines = [""] * (text.count("\n") + 1)
    for match in FENCE.finditer(text):
        if match.group(1) == "python":
            first = text[: match.start(2)].count("\n")
            body = match.group(2).splitlines()
            lines[first : first + len(body)] = body
    return "\n".join(lines)


def execute(page, text):
    """Run a page's program from the root of the repository."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    run = f"exec(compile({program(text)!r}, {str(page)!r}, 'exec'), {{'__name__': '__main__'}})"
    return subprocess.run(
        [sys.executable, "-"], input=run, env=env, cwd=ROOT, capture_output=True, text=True, timeout=600
    )


WITH_CODE = [p for p in PAGES if program(p.read_text()).strip()]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=lambda p: p.name)
def test_the_code_of_a_page_runs(page):
    done = execute(page, page.read_text())
    assert done.returncode == 0, f"{page.name}:\n{done.stderr[-3000:]}"


def test_a_page_with_a_wrong_block_fails_at_its_line():
    first = "```python\nimport jax\nassert jax.device_count() == 4\n```\n"
    page = f"# Page\n\n{first}\ntext\n\n```python\nassert jax.device_count() == 3\n```\n"
    done = execute(Path("page.md"), page)
    assert done.returncode == 1 and 'File "page.md", line 11' in done.stderr and "AssertionError" in done.stderr
    right = page.replace("== 3", "== 4")
    assert execute(Path("page.md"), right).returncode == 0
    assert program("```bash\nrm x\n```\n").strip() == ""  # other languages are not run


def commands():
    """Every `jmoe ...` and `python -m jmoe ...` in a shell block, as (page, words)."""
    for page in PAGES:
        for match in FENCE.finditer(page.read_text()):
            if match.group(1) in ("bash", "console", "sh"):
                for line in match.group(2).replace("\\\n", " ").splitlines():
                    words = shlex.split(line.removeprefix("$ "), comments=True)
                    at = next((i for i, w in enumerate(words) if Path(w).name == "jmoe"), None)
                    if at is not None and (at == 0 or words[at - 1] == "-m"):
                        yield page.name, words[at + 1 :]


@pytest.mark.parametrize("page, words", list(commands()), ids=lambda v: " ".join(v) if isinstance(v, list) else v)
def test_a_command_in_the_documentation_is_one_that_the_parser_takes(page, words):
    with contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            args = cli._parser(words).parse_args(words)
        except SystemExit as e:
            raise AssertionError(f"{page}: {err.getvalue()}") from e
    assert args.command in cli.HELP
    if args.command == "explain":
        assert cli.layer_config(args) is not None or True


# --- the worked examples of docs/extending.md, on a copy


def apply(text, root):
    """Apply a page's diffs: what a hunk takes away must be in its file exactly once. Returns the files changed."""
    changed = []
    for match in FENCE.finditer(text):
        if match.group(1) != "diff":
            continue
        head, *hunks = match.group(2).split("@@\n")
        path = root / re.search(r"^\+\+\+ b/(.+)$", head, re.MULTILINE).group(1)
        for hunk in hunks:
            lines = hunk.splitlines()
            before, after = ("".join(f"{x[1:]}\n" for x in lines if not x.startswith(sign)) for sign in "+-")
            whole = path.read_text()
            assert whole.count(before) == 1, f"{path.name} has {whole.count(before)} times:\n{before}"
            path.write_text(whole.replace(before, after))
        changed.append(path)
    return changed


@pytest.mark.slow
def test_the_worked_examples_of_the_extending_page_work_as_written(tmp_path):
    page = (ROOT / "docs" / "extending.md").read_text()
    skip = shutil.ignore_patterns("__pycache__", "models", "*.so")
    for name in ("jmoe", "pallas_kernels", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=skip)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (ring,) = (m.group(2) for m in FENCE.finditer(page) if "class Ring" in m.group(2))
    (tmp_path / "jmoe" / "backends" / "ring.py").write_text(ring)
    assert len(apply(page, tmp_path)) == 5
    selected = "tests/test_policy.py tests/test_formats.py tests/test_explain.py tests/test_quantize_rules.py".split()
    layer = "tests/test_layer.py::test_F46_every_backend_and_rank_count_computes_the_dense_layer[ring-4]"
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider"]
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    for which in ([*selected, "-k", "ring or mxfp8_64 or json"], [layer]):
        done = subprocess.run([*command, *which], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]


LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)(?:#[^)]*)?\)")
PATH = re.compile(r"`((?:jmoe|pallas_kernels|tests|examples|docs|\.ci)/[\w./*-]*)`")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_and_paths_lead_to_something(page):
    text = page.read_text()
    missing = [t for t in LINK.findall(text) if not (page.parent / t).exists()]
    missing += [t for t in PATH.findall(text) if not list(ROOT.glob(t.rstrip("/")))]
    assert not missing, missing


def strings_of_the_source():
    """All strings of the packages, with the values of f-strings left out."""
    parts = []
    for path in [*(ROOT / "jmoe").rglob("*.py"), *(ROOT / "pallas_kernels").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts.append("".join(v.value if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                parts.append(node.value)
    return parts


def test_messages_that_the_troubleshooting_page_explains_are_messages_of_the_code():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    messages = [m for row in rows for m in re.findall(r"`([^`]+)`", row)]
    source = strings_of_the_source()
    assert len(messages) > 50
    unknown = []
    for message in messages:
        pattern = re.compile(r"[\s\S]*?".join(map(re.escape, message.split("..."))))
        if not any(pattern.search(text) for text in source):
            unknown.append(message)
    assert not unknown, unknown


def test_every_page_is_listed_in_the_readme():
    readme = (ROOT / "README.md").read_text()
    unlisted = [p.name for p in PAGES[1:] if f"docs/{p.name}" not in readme]
    assert not unlisted, unlisted


# --- docs/make.py


def load_make():
    spec = importlib.util.spec_from_file_location("docs_make", ROOT / "docs" / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make = load_make()


needs_new_jax = pytest.mark.skipif(
    not compat.KERNELS_SUPPORTED, reason="the tables state kernels' reasons, which ask for JAX >= 0.11"
)


@needs_new_jax
def test_what_is_made_is_in_step_with_its_sources(capsys):
    assert make.main(["--check"]) == 0, capsys.readouterr().err


def records(meaningful=True, seconds=1e-4):
    environment = {"num_devices": 2, "device_kind": "NVIDIA H200", "jax": "0.11.2", "time": "2026-11-30T06:00:00"}
    return [
        common.Record(
            "quantise mxfp8",
            "16384x7168 bfloat16",
            3800.0,
            "GB/s",
            seconds=seconds,
            ceiling=4000.0,
            ceiling_name="copy",
            peer=1600.0,
            peer_name="plain XLA",
            meaningful=meaningful,
            parameters={"T": 16384, "peers": {"plain XLA": 1600.0, "torch.compile": 3200.0}},
            environment=environment,
        )
    ]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A repository with a README and figures of its own."""
    figures = tmp_path / "docs" / "figures"
    figures.mkdir(parents=True)
    (tmp_path / "README.md").write_text("before\n<!-- made: figures -->\nold\n<!-- end: figures -->\nafter\n")
    pictures = {"PICTURE": figures / "throughput.png", "CURVES": figures / "training.png"}
    for name, value in {"ROOT": tmp_path, "FIGURES": figures, **pictures}.items():
        monkeypatch.setattr(make, name, value)
    monkeypatch.setattr(make.load, "__defaults__", (figures,))
    monkeypatch.setattr(make.digest, "__defaults__", (figures, *make.digest.__defaults__[1:]))
    return tmp_path


@needs_new_jax
def test_the_readme_follows_the_figures_that_there_are(elsewhere, capsys):
    readme, figures = elsewhere / "README.md", elsewhere / "docs" / "figures"
    assert make.main(["--check"]) == 1 and "README.md is out of step" in capsys.readouterr().err
    assert make.main([]) == 0 and "No figures are committed yet" in readme.read_text()
    assert make.main(["--check"]) == 0

    common.write_json(figures / "quantize.json", "quantize", records())
    assert make.main(["--check"]) == 1
    assert make.main([]) == 0
    text = readme.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| quantise mxfp8 | 16384x7168 bfloat16 | 3,800 GB/s | 95 % of copy |" in text
    assert "plain XLA 1,600, torch.compile 3,200" in text and "2 x NVIDIA H200, JAX 0.11.2" in text
    assert make.PICTURE.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and make.main(["--check"]) == 0
    assert (figures / "quantize.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"

    common.write_json(figures / "quantize.json", "quantize", records(seconds=2e-4))  # the picture is now of other data
    said = capsys.readouterr().err if make.main(["--check"]) == 1 else ""
    assert "throughput.png" in said and "quantize.png" in said
    readme.write_text(text.replace("3,800", "9,999"))  # and somebody improved a figure by hand
    make.main([])
    readme.write_text(readme.read_text().replace("3,800", "9,999"))
    assert make.main(["--check"]) == 1 and "README.md" in capsys.readouterr().err


def layer_figure(name, tokens, ranks, seconds, **more):
    parameters = {"shape": "qwen3", "D": 256, "F": 128, "E": 8, "K": 2, "T": tokens, "R": ranks, **more}
    case = f"qwen3 T={tokens}" + (f" R={ranks}" if ranks > 1 else "")
    return common.Record(name, case, tokens / seconds, "tokens/s", seconds=seconds, parameters=parameters)


def test_the_layers_table_has_a_column_for_each_way_and_says_where_a_wire_pays():
    seen = dict(kernels=9.0, busy_us=100.0, span_us=104.0)
    records = [layer_figure("BF16", 8, 1, 2e-3, **seen), layer_figure("FP8-128", 8, 1, 1e-3)]
    records += [layer_figure("EP, BF16 wire", 8, 2, 3e-3), layer_figure("EP, MXFP8 wire", 8, 2, 2.5e-3)]
    text = make.layer_text(records)
    assert "| tokens | BF16 | FP8-128 |" in text and "| 8 | 2 ms | 1 ms (2.00 x) |" in text
    assert "| 8 | 3 ms (1.50 of one GPU's time) | 2.5 ms (1.20 x) |" in text
    assert "MXFP8 from 8 tokens." in text and "of several tokens 1.04 to 1.04." in text and "of these." in text
    assert "| BF16 | qwen3 T=8 | 2 ms | 9 | 100 us | 104 us | 1.04 | 0.0" in make.layer_details(records)


def test_the_models_table_has_a_row_for_each_batch():
    def figure(what, batch, weights, ranks, value):
        parameters = {"what": what, "B": batch, "weights": weights, "R": ranks}
        case = f"batch {batch}, context 9" + (f", R={ranks}" if ranks > 1 else "")
        how = dict(ceiling=2000.0, ceiling_name="copy", parameters=parameters)
        return common.Record(f"{what}, {weights} weights", case, value, "tokens/s", **how)

    records = [figure("decode", 8, "NVFP4", 1, 1000.0), figure("decode", 8, "BF16", 2, 500.0)]
    text = make.model_text([*records, figure("prefill", 2, "BF16", 1, 1500.0)])
    assert "| BF16 weights | NVFP4 weights | BF16 weights, 2 GPUs |" in text
    assert (
        "| prefill | 1,500, 75 % |  |  |" in text
        and "| decode, batch 8, context 9 |  | 1,000, 50 % | 500, 25 % |" in text
    )


@needs_new_jax
def test_a_second_machine_adds_to_a_benchmark(elsewhere):
    figures = elsewhere / "docs" / "figures"
    common.write_json(figures / "quantize.json", "quantize", records())
    before = make.digest()
    other = records()[0]
    other = dataclasses.replace(other, environment=dict(other.environment, num_devices=8))
    common.write_json(figures / "quantize_8gpus.json", "quantize", [other])
    assert [r.environment["num_devices"] for r in make.load()["quantize"]] == [2, 8] and make.digest() != before
    assert "2 x NVIDIA H200, JAX 0.11.2, 2026-11-30; 8 x NVIDIA H200" in make.where(make.load()["quantize"])


@needs_new_jax
def test_training_curves_follow_their_history(elsewhere, capsys):
    page, figures = elsewhere / "docs" / "flax.md", elsewhere / "docs" / "figures"
    page.write_text("<!-- made: training -->\n<!-- end: training -->\n")
    history = [{"step": i, "bytes": i * 1000, "train": 8.0 / i, "balance": 1.0, "seconds": 0.1 * i} for i in (1, 2, 3)]
    run = {
        "parameters": 2_500_000_000,
        "steps": 3,
        "batch": 4,
        "context": 8,
        "devices": 2,
        "device_kind": "NVIDIA H200",
    }
    run |= {"tokens_per_second": 250_000.0, "mfu": 0.301}
    result = run | {"history": history, "runs": {"none": history, "mxfp8": history}, "gzip_bits_per_byte": 2.0}
    result |= {"figures": {"none": run, "mxfp8": run | {"mfu": 0.25}}}
    (figures / "training.json").write_text(json.dumps(result))
    assert make.main(["--check"]) == 1 and "training.png is out of step" in capsys.readouterr().err
    assert make.main([]) == 0 and make.main(["--check"]) == 0
    assert "| `mxfp8` | 250,000 | 25.0 % | 4.889 |" in page.read_text() and "2.5 billion parameters" in page.read_text()
    assert make.CURVES.stat().st_size > 10_000


@needs_new_jax
def test_figures_that_mean_nothing_are_refused(elsewhere, capsys):
    figures = elsewhere / "docs" / "figures"
    common.write_json(figures / "quantize.json", "quantize", records(meaningful=False))
    assert make.main([]) == 1 and "say nothing about speed" in capsys.readouterr().err
    common.write_json(figures / "quantize.json", "layer", records())
    assert make.main([]) == 1 and "its name says quantize" in capsys.readouterr().err


def test_marks_that_are_open_or_unknown_are_refused():
    with pytest.raises(ValueError, match="nothing is made for 'speeds'"):
        make.fill("<!-- made: speeds -->\n<!-- end: speeds -->\n", {}, Path("a.md"))
    with pytest.raises(ValueError, match="has no `<!-- end"):
        make.fill("<!-- made: figures -->\n", {"figures": ""}, Path("a.md"))
