"""`jmoe quantize IN OUT --format nvfp4`: the command line's part of this package."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from .errors import CheckpointError
from .folder import Checkpoint
from .save import FORMATS, quantize_folder
from .schemes import KINDS


def add_subparser(subparsers) -> None:
    """Adds `quantize` to a command line's subparsers; the parsed arguments' `run(arguments)` does the work."""
    parser = subparsers.add_parser(
        "quantize",
        help="convert a checkpoint's experts to a low-bit format",
        description="Writes OUT, a Hugging Face folder with the routed experts in another format and all else "
        "unquantised. A run that was interrupted goes on where it stopped; OUT appears when it is complete.",
        epilog="example: jmoe quantize Qwen3-30B-A3B Qwen3-30B-A3B-NVFP4 --format nvfp4",
    )
    add_arguments(parser)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `jmoe quantize`."""
    parser.add_argument(
        "source", metavar="IN", type=Path, help="a Hugging Face folder with config.json and safetensors"
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write; it must not exist")
    formats, schemes = tuple(FORMATS), ("unquantised", *KINDS)
    parser.add_argument(
        "--format",
        required=True,
        choices=formats,
        metavar="FORMAT",
        help=f"what the experts become: {', '.join(formats)}",
    )
    parser.add_argument(
        "--scheme",
        choices=schemes,
        metavar="NAME",
        help=f"how IN is stored, if its configuration is wrong about it: {', '.join(schemes)}",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    parser.set_defaults(run=run)


def _bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))


def run(arguments: argparse.Namespace) -> int:
    """Does what the arguments say; returns the exit status, after one line about what was written or went wrong."""
    try:
        quantize_folder(
            arguments.source,
            arguments.out,
            format=arguments.format,
            scheme=arguments.scheme,
            progress=False if arguments.quiet else None,
        )
        with Checkpoint(arguments.out) as written:
            name = written.scheme.name
    except (CheckpointError, ValueError, OSError) as e:
        print(f"jmoe quantize: {e}", file=sys.stderr)
        return 1
    before, after = _bytes(arguments.source), _bytes(arguments.out)
    print(f"{arguments.out}: {name}, {after / 1e6:.1f} MB, {after / before:.2f} of the {before / 1e6:.1f} MB of IN")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """The command on its own: python -m jmoe.checkpoint.cli IN OUT --format nvfp4."""
    parser = argparse.ArgumentParser(prog="jmoe quantize")
    add_arguments(parser)
    parsed = parser.parse_args(arguments)
    return parsed.run(parsed)


if __name__ == "__main__":
    sys.exit(main())
