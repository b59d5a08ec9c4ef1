"""The command line: `jmoe explain`, `jmoe doctor`, `jmoe bench`, `jmoe quantize`.

Exit status: 0 if all is well, 1 if something was found to be wrong, 2 for a command that makes no sense.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from . import __version__

if TYPE_CHECKING:
    from .machine import Probes
    from .selftest import Case, Result

# Heavier imports (JAX, the policy, benchmarks) wait until a command needs them, so that --help is quick.

MACHINES = {
    "h100": ("NVIDIA H100", (9, 0)),
    "h200": ("NVIDIA H200", (9, 0)),
    "b200": ("NVIDIA B200", (10, 0)),
    "a100": ("NVIDIA A100", (8, 0)),
    "l40s": ("NVIDIA L40S", (8, 9)),
    "cpu": ("CPU", None),
}


HELP = {
    "explain": "what a layer would send, who quantises it, why, and what it costs",
    "doctor": "what is wrong with this machine's setup, and whether it computes correctly",
    "bench": "measure one part beside its peers and ceilings, or compare two runs",
    "quantize": "convert a checkpoint's experts to a low-bit format",
}
EXAMPLES = """examples:
  jmoe doctor
  jmoe explain qwen3-30b-a3b --devices 8 --tokens 4096 --quant nvfp4_online
  jmoe explain Qwen3-30B-A3B/config.json --machine b200
  jmoe bench dispatch --smoke
  jmoe bench layer --json after.json && jmoe bench compare before.json after.json
  jmoe quantize Qwen3-30B-A3B Qwen3-30B-A3B-NVFP4 --format nvfp4

`jmoe COMMAND --help` has the options of a command. Exit status: 0 if all is well, 1 if something was
found to be wrong, 2 for a command that makes no sense."""


class _Help(argparse.RawDescriptionHelpFormatter):
    """Options and what they mean side by side; descriptions and examples as they are written."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32, width=min(shutil.get_terminal_size().columns, 104) - 2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit status is returned. Without a command, say which ones there are."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser(argv)
    args, rest = parser.parse_known_args(argv)
    if rest and hasattr(args, "files") and not any(word.startswith("-") for word in rest):
        args.files, rest = [*args.files, *rest], []  # argparse stops taking files at the first option
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return args.run(args)
    except (ValueError, NotImplementedError) as refusal:
        Console(stderr=True).print(f"jmoe {args.command}: {refusal}", style="red", markup=False, highlight=False)
        return 2


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jmoe",
        description="Expert-parallel Mixture-of-Experts for JAX on NVIDIA GPUs.",
        epilog=EXAMPLES,
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"jmoe {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    _add_explain(commands)
    _add_doctor(commands)
    _add_bench(commands)
    _add_quantize(commands, asked=argv[:1] == ["quantize"])
    return parser


def _add_quantize(commands, *, asked: bool) -> None:
    if not asked:  # its options are in a package that loads JAX, which `jmoe doctor` may have to do without
        commands.add_parser("quantize", help=HELP["quantize"])
        return
    from .checkpoint.cli import add_subparser

    add_subparser(commands)


# --- explain


def _add_explain(commands) -> None:
    p = commands.add_parser(
        "explain",
        help=HELP["explain"],
        formatter_class=_Help,
        description="What a layer would send between its ranks, who quantises it and why, how large its buffers are,\n"
        "what every other backend would do instead, and what a Blackwell machine would do.",
        epilog="examples:\n  jmoe explain deepseek-v3 --machine h200 --devices 8 --quant fp8\n"
        "  jmoe explain --hidden 2048 --intermediate 768 --experts 128 --top-k 8 --tokens 64",
    )
    p.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a named shape (qwen3-30b-a3b, deepseek-v3, gpt-oss-120b, mixtral-8x7b, ...; a wrong name lists all), a "
        "Hugging Face config.json, or the folder that holds one",
    )
    layer = p.add_argument_group("the layer (without MODEL, or in place of what it says)")
    layer.add_argument("--hidden", type=int, metavar="D", help="hidden size")
    layer.add_argument("--intermediate", type=int, metavar="F", help="width of one expert")
    layer.add_argument("--experts", type=int, metavar="E", help="number of experts")
    layer.add_argument("--top-k", type=int, metavar="K", help="experts of one token")
    layer.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), metavar="DTYPE", help="of what is not quantised"
    )
    layer.add_argument(
        "--capacity-factor", type=float, metavar="X", help="limit of rows for each pair of ranks (default: dropless)"
    )
    quant = p.add_argument_group("quantisation")
    quant.add_argument(
        "--quant",
        metavar="FORMAT",
        help="of the activations: mxfp8, fp8, nvfp4_online, modelopt_fp4, mxfp4, none; auto: only the wire, if faster",
    )
    quant.add_argument("--weights", metavar="FORMAT", help="that the expert weights are kept in")
    quant.add_argument("--wire", metavar="FORMAT", help="that travels, in place of the policy's choice")
    quant.add_argument("--combine-wire", metavar="FORMAT", help="that expert outputs travel back in: mxfp8")
    quant.add_argument("--mx-alignment", type=int, metavar="N", help="pad MX payloads to a multiple of N columns")
    where = p.add_argument_group("where it runs")
    where.add_argument("--backend", default="auto", metavar="NAME", help="how tokens move (default: auto)")
    where.add_argument(
        "--devices", type=int, metavar="R", help="expert-parallel ranks (default: this machine's devices)"
    )
    where.add_argument("--tokens", type=int, default=4096, metavar="T", help="tokens on each rank (default: 4096)")
    where.add_argument(
        "--machine",
        choices=tuple(MACHINES),
        metavar="NAME",
        help=f"another machine than this one: {', '.join(MACHINES)}",
    )
    where.add_argument(
        "--hosts", type=int, default=1, metavar="N", help="hosts that the ranks are spread over, with --machine"
    )
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=_explain)


def _explain(args: argparse.Namespace) -> int:
    from .policy import explain
    from .policy.render import render

    config = layer_config(args)
    caps, num_ranks = _machine(args)
    explanation = explain(config, backend=args.backend, num_ranks=num_ranks, tokens=args.tokens, caps=caps)
    if args.json:
        print(json.dumps(explanation.to_json(), indent=1))
    else:
        console = Console()
        width = min(console.width, 120)
        console.print(render(explanation, width=width), width=width)
    return 0


def layer_config(args: argparse.Namespace):
    """The MoEConfig that the arguments of `explain` describe. ValueError says what is missing."""
    from .checkpoint.schemes import scheme_from_config
    from .config import MoEConfig, QuantConfig, from_hf
    from .shapes import SHAPES, get_shape

    sizes = {
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_experts": args.experts,
        "num_experts_per_tok": args.top_k,
        "dtype": args.dtype,
        "capacity_factor": args.capacity_factor,
    }
    given = {k: v for k, v in sizes.items() if v is not None}
    weights = args.weights
    if args.model is None:
        missing = [flag for flag in ("hidden", "intermediate", "experts", "top_k") if getattr(args, flag) is None]
        if missing:
            flags = ", ".join("--" + m.replace("_", "-") for m in missing)
            raise ValueError(
                f"No model was named and {flags} {'is' if len(missing) == 1 else 'are'} missing. Name a shape "
                f"({', '.join(SHAPES)}), a config.json, or give all of --hidden, --intermediate, --experts, --top-k."
            )
        config = MoEConfig(**given)
    elif args.model in SHAPES:
        config = dataclasses.replace(get_shape(args.model), **given)
    else:
        path = Path(args.model)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(
                f"{args.model!r} is neither a file, nor a folder with a config.json, nor a named shape; named shapes "
                f"are {', '.join(SHAPES)}."
            )
        described = _read_json(path)
        config = dataclasses.replace(from_hf(described), **given)
        stored = scheme_from_config(described, None, str(path.parent)).kind
        if weights is None and stored is not None:
            weights = stored.format
    auto = args.quant == "auto"
    quant = {
        "activations": None if auto else args.quant,
        "weights": weights,
        "wire": args.wire or ("fastest" if auto else None),
        "combine_wire": args.combine_wire,
        "mx_alignment": args.mx_alignment,
    }
    return dataclasses.replace(config, quant=QuantConfig(**{k: v for k, v in quant.items() if v is not None}))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as e:
        raise ValueError(f"{path} cannot be read as JSON ({e}); give a Hugging Face config.json.") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} holds a {type(data).__name__}, not an object; give a Hugging Face config.json.")
    return data


def _machine(args: argparse.Namespace):
    """(capabilities, ranks): of the machine that was named, or of this one."""
    from .caps import DeviceCaps

    if args.devices is not None and args.devices < 1:
        raise ValueError(f"--devices {args.devices} must be at least 1.")
    if args.machine is None:
        if args.hosts != 1:
            raise ValueError(f"--hosts {args.hosts} describes another machine; name it with --machine.")
        caps = DeviceCaps.detect()
        ranks = args.devices or caps.num_devices
        if ranks > caps.num_devices:  # more ranks than there are here: as if the machine had that many
            link = caps.link if caps.num_devices > 1 else "nvlink" if caps.platform == "gpu" else "host"
        else:
            link = "local" if ranks == 1 else caps.link
        hosts = caps.num_hosts if ranks == caps.num_devices else 1
        return dataclasses.replace(caps, num_devices=ranks, link=link, num_hosts=hosts), ranks
    name, capability = MACHINES[args.machine]
    ranks = args.devices or 8
    linked = "nvlink" if capability and capability[0] != 8 or args.machine == "a100" else "host"
    link = "network" if args.hosts > 1 else "local" if ranks == 1 else linked
    platform = "gpu" if capability else "cpu"
    if args.hosts < 1 or ranks % args.hosts:
        raise ValueError(f"--hosts {args.hosts} for {ranks} devices; hosts must hold equally many.")
    return DeviceCaps(platform, capability, num_devices=ranks, link=link, name=name, num_hosts=args.hosts), ranks


# --- doctor


def _add_doctor(commands) -> None:
    p = commands.add_parser(
        "doctor",
        help=HELP["doctor"],
        formatter_class=_Help,
        description="Devices, driver, versions, peer access, NCCL; which kernels can run and why not; and ten seconds\n"
        "of tests that this machine computes what it should. Exit status 1 if something does not work;\n"
        "warnings (slower, or less than it could be) leave it at 0.",
    )
    p.add_argument("--no-self-test", action="store_true", help="look, and compute nothing")
    p.add_argument("--json", action="store_true", help="print JSON")
    p.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    return run_doctor(self_test=not args.no_self_test, as_json=args.json)


def run_doctor(
    *,
    self_test: bool = True,
    as_json: bool = False,
    probes: Probes | None = None,
    cases: Sequence[Case] | None = None,
) -> int:
    """Print what `jmoe.doctor.examine` finds; its exit status. probes, cases: as there."""
    from . import doctor

    console = Console(stderr=as_json)
    with _progress(console) as progress:
        watch = _Watch(progress, "looking at the machine")
        step = lambda name: watch.step(f"self-test: {name}")  # noqa: E731
        report = doctor.examine(probes, self_test=self_test, cases=cases, step=step)
    if as_json:
        print(json.dumps(report.to_json(), indent=1))
        return report.status
    console.print("[bold]Setup[/]")
    console.print(_lines([(f.level, f.what, f.todo) for f in report.findings]))
    console.print("\n[bold]GPU kernels[/]")
    console.print(_lines([("runs" if k.runs else "off", k.name, k.why) for k in report.kernels]))
    if report.self_test:
        console.print("\n[bold]Self-test[/] [dim](signal to noise against float64 on the host)[/]")
        console.print(_lines([(r.status, *_result(r)) for r in report.self_test]))
    colour = "red" if report.status else "yellow" if report.warned else "green"
    console.print(f"\n{report.verdict()}", style=colour, highlight=False)
    return report.status


def _result(r: Result) -> tuple[str, str]:
    if r.status == "skipped":
        return f"{r.name}: not run", r.detail
    figure = "did not run through" if r.sqnr is None else f"{r.sqnr:.1f} dB, must be {r.limits}"
    return f"{r.name}: {figure}", f"{r.detail}; {r.seconds:.1f} s"


def _lines(rows: Sequence[tuple[str, str, str]]) -> Table:
    """Rows of a mark, a statement and, below it, what to do or how it ran."""
    colours = {"problem": "red", "failed": "red", "warning": "yellow", "off": "dim", "skipped": "yellow"}
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=0)
    grid.add_column(no_wrap=True, min_width=8)
    grid.add_column()
    for mark, statement, more in rows:
        grid.add_row("", Text(mark, style=colours.get(mark, "green")), Text(statement))
        if more:
            grid.add_row("", "", Text(more, style="dim"))
    return grid


# --- bench


def _add_bench(commands) -> None:
    from .bench import BENCHES

    p = commands.add_parser(
        "bench",
        help=HELP["bench"],
        description="Measure one part of jmoe beside its peers and its ceilings, all in the same run; or compare two "
        "runs.",
        formatter_class=_Help,
        epilog="benchmarks:\n"
        + "\n".join(f"  {name:<16}{what}" for name, what in BENCHES.items())
        + "\n  compare         two files of one benchmark; exit status 1 if a figure got worse"
        + "\n\nexamples:\n  jmoe bench quantize --json q.json --plot q.png"
        + "\n  jmoe bench compare before.json after.json --threshold 3",
    )
    p.add_argument("name", metavar="NAME", help="one of the benchmarks below")
    p.add_argument("files", nargs="*", metavar="FILE", help="for compare: the files of two runs")
    p.add_argument("--smoke", action="store_true", help="tiny shapes, seconds on a CPU; speeds are not meaningful")
    p.add_argument("--only", metavar="REGEX", help="only figures whose name and case fit: 'EP', '^BF16.*T=64$'")
    p.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    p.add_argument("--plot", metavar="FILE", help="write a picture (PNG) to FILE")
    p.add_argument("--tune", action="store_true", help="search for better kernel parameters (grouped-matmul)")
    p.add_argument(
        "--threshold", type=float, default=5.0, metavar="PERCENT", help="for compare: changes up to this are noise"
    )
    p.set_defaults(run=_bench)


class _Watch:
    """Progress of a benchmark or a self-test on a progress bar; a benchmark's in lines on stderr without a terminal."""

    def __init__(self, bar: Progress, first: str = "starting", keep: Callable[[list], None] | None = None):
        """keep: called with all figures so far, each time that there is another."""
        self.bar, self.first, self.task = bar, first, bar.add_task(first, total=None)
        self.records, self.keep, self.begun = [], keep, time.perf_counter()

    def _say(self, what: str) -> None:
        if self.bar.disable and self.keep is not None:
            print(f"[{time.perf_counter() - self.begun:6.1f} s] {what}", file=sys.stderr, flush=True)

    def start(self, total: int) -> None:
        self.bar.update(self.task, total=total)

    def step(self, description: str) -> None:
        task = self.bar.tasks[self.task]
        advance = 0 if task.description == self.first else 1
        self.bar.update(self.task, description=description, advance=advance)
        self._say(description)

    def record(self, record) -> None:
        from .bench.compare import duration, number

        self.records.append(record)
        self._say(f"{record.name}, {record.case}: {number(record.value)} {record.unit}, {duration(record.seconds)}")
        if self.keep is not None:
            self.keep(self.records)


def _progress(console: Console) -> Progress:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _bench(args: argparse.Namespace) -> int:
    if args.name == "compare":
        return _compare(args)
    if args.files:
        raise ValueError(f"bench {args.name} takes no files, got {args.files}; --json FILE writes one.")
    from .bench import common, compare, module_name, plot

    for option in (args.json, args.plot):
        if option and not Path(option).absolute().parent.is_dir():
            raise ValueError(f"{option} cannot be written: its folder does not exist. Make it first.")
    module = _bench_module(module_name(args.name))
    if args.tune and not hasattr(module, "tune"):
        raise ValueError(f"bench {args.name} has nothing to tune; --tune goes with grouped-matmul.")
    how = {} if args.only is None else {"only": _only(args, module)}
    console = Console()

    environment = common.environment()

    def save(records: list) -> None:
        if args.json:  # a run that is cut short leaves what it has
            kept = [dataclasses.replace(r, environment=environment) for r in records]
            common.write_json(args.json, args.name, kept)

    with _progress(console) as bar:
        watch = _Watch(bar, keep=save)
        records = module.tune(watch, **how) if args.tune else module.run(args.smoke, watch, **how)
    if args.only is not None and not records:
        raise ValueError(
            f"bench {args.name} has no figure that --only {args.only!r} fits; leave it out to see them all."
        )
    environment = common.environment()
    records = [dataclasses.replace(r, environment=environment) for r in records]
    where = f"{environment['num_devices']} x {environment['device_kind']}, JAX {environment['jax']}"
    compare.report(console, records, title=f"jmoe bench {args.name}: {where}")
    if args.json:
        common.write_json(args.json, args.name, records)
        console.print(f"Wrote {args.json}.", highlight=False)
    if args.plot:
        plot.draw(module, args.name, records, args.plot)
        console.print(f"Wrote {args.plot}.", highlight=False)
    return 0


def _only(args: argparse.Namespace, module: Any) -> re.Pattern[str]:
    measures = module.tune if args.tune else module.run
    if "only" not in inspect.signature(measures).parameters:
        what = f"bench {args.name}" + (" --tune" if args.tune else "")
        raise ValueError(f"{what} takes no --only: it measures everything. Leave the option out.")
    try:
        return re.compile(args.only)
    except re.error as e:
        raise ValueError(f"--only {args.only!r} is not a regular expression: {e}.") from None


def _bench_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name != name:
            raise ValueError(f"{name} needs {e.name}, which is not installed; pip install it.") from None
        raise ValueError(f"{name} is not part of this installation.") from None


def _compare(args: argparse.Namespace) -> int:
    from .bench import common, compare

    if len(args.files) != 2:
        raise ValueError(f"bench compare takes two files, got {len(args.files)}: jmoe bench compare A.json B.json")
    (name_a, a), (name_b, b) = (common.read_json(f) for f in args.files)
    if name_a != name_b:
        raise ValueError(
            f"{args.files[0]} is of bench {name_a!r} and {args.files[1]} of {name_b!r}; compare two runs of the same."
        )
    changes = compare.compare(a, b, threshold=args.threshold / 100)
    console = Console()
    console.print(compare.compare_table(changes, title=f"jmoe bench {name_a}: A {args.files[0]}, B {args.files[1]}"))
    for key, (old, new) in compare.differing_environment(a, b).items():
        console.print(f"The runs differ in {key}: {old} and {new}.", highlight=False)
    return int(any(c.verdict == "worse" for c in changes))


if __name__ == "__main__":
    sys.exit(main())
