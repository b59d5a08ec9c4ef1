"""Text for the small model: bytes as tokens, and a corpus that every Python installation carries.

Token ids 0..255 are the bytes of UTF-8 text, 256 ends a document and 257 pads. The corpus is the standard library's own
source, docstrings and documentation topics (`*.py`, found through sysconfig), read in a fixed order. The modules in
HELD_OUT, and the standard library's tests of them, are never trained on.
"""

from __future__ import annotations

import gzip
import json
import pathlib
import sysconfig

import numpy as np

END, PAD, VOCAB = 256, 257, 264  # the vocabulary is rounded up to a multiple of 8

# Modules that are the same in every Python from 3.11 to 3.14, give or take a few lines: 21 files, about 460 KB.
HELD_OUT = (
    "bisect calendar cmd colorsys configparser csv fractions ftplib graphlib mailbox netrc plistlib poplib queue sched "
    "shelve shlex statistics textwrap wave zipapp"
).split()
SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "encodings",
    "__pycache__",
    "lib-dynload",
}  # tables, other people's code


class ByteTokenizer:
    """Text <-> bytes. `end` is the id that starts and ends a document, `pad` never reaches the model's MoE layers."""

    end, pad = END, PAD

    def encode(self, text: str) -> list[int]:
        return [self.end, *text.encode("utf-8")]

    def decode(self, ids) -> str:
        return bytes(int(i) for i in ids if i < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """The tokenizer.json of a Hugging Face folder, through the `tokenizers` package."""

    def __init__(self, folder: pathlib.Path, config: dict):
        try:
            import tokenizers
        except ImportError as e:
            raise ImportError(
                f"{folder / 'tokenizer.json'} has a vocabulary of its own, which needs the `tokenizers` package; "
                "byte-level models do without. Install it with `pip install tokenizers`."
            ) from e
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        end = config.get("eos_token_id")
        self.end = end[0] if isinstance(end, list) else -1 if end is None else end
        self.pad = config.get("pad_token_id") or 0

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def decode(self, ids) -> str:
        return self.tokenizer.decode([int(i) for i in ids])


def load_tokenizer(folder) -> ByteTokenizer | FileTokenizer:
    """The tokenizer of a model folder; a vocabulary of at most 512 without a tokenizer.json is taken to be bytes."""
    folder = pathlib.Path(folder)
    config = json.loads((folder / "config.json").read_text())
    if (folder / "tokenizer.json").exists():
        return FileTokenizer(folder, config)
    if config["vocab_size"] > 512:
        raise ValueError(
            f"{folder} has a vocabulary of {config['vocab_size']} tokens and no tokenizer.json; only byte "
            "vocabularies (at most 512 tokens) work without one. Put the model's tokenizer.json into the folder."
        )
    return ByteTokenizer()


def _tokens(path: pathlib.Path) -> np.ndarray:
    return np.concatenate([[END], np.frombuffer(path.read_text("utf-8").encode("utf-8"), np.uint8)]).astype(np.int32)


def held_out_text(library=None) -> np.ndarray:
    """Token ids (int32 [N]) of the held-out modules, END before each. FileNotFoundError if this Python has no sources.

    library: folder of a standard library, this interpreter's unless told.
    """
    root = pathlib.Path(library or sysconfig.get_paths()["stdlib"])
    paths = [root / f"{name}.py" for name in HELD_OUT]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise FileNotFoundError(
            f"Asked for the standard library's source as text, but {root} lacks {', '.join(missing)}. Any Python with "
            "its source files will do (not a zipped or compiled-only one): install this interpreter's full standard "
            "library."
        )
    return np.concatenate([_tokens(path) for path in paths])


def training_text(library=None) -> np.ndarray:
    """Token ids (int32 [N]) of all other files of the standard library, in order of their paths, END before each."""
    root = pathlib.Path(library or sysconfig.get_paths()["stdlib"])
    documents = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if SKIPPED_FOLDERS.intersection(parts) or path.stem.removeprefix("test_") in HELD_OUT:
            continue
        try:
            documents.append(_tokens(path))
        except UnicodeDecodeError:  # a few of the standard library's tests are files in broken encodings on purpose
            continue
    return np.concatenate(documents)


def gzip_bits_per_byte(tokens: np.ndarray) -> float:
    """Bits per byte of `gzip -9` over the same text in one stream."""
    text = tokens[tokens < 256].astype(np.uint8).tobytes()
    return 8 * len(gzip.compress(text, 9, mtime=0)) / len(text)


def windows(tokens: np.ndarray, context: int, *, limit: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Cuts text into overlapping windows so that each byte is predicted once, with at least context/2 tokens before it.

    Returns inputs int32 [W, context + 1] (predict column j+1 from columns 0..j) and scored bool [W, context], which is
    True where the target counts: the second half of a window, all of the first window, never an END. `limit` keeps that
    many windows, evenly spread over the text.
    """
    half = context // 2
    starts = np.arange(0, len(tokens) - context, half)
    if limit is not None and limit < len(starts):
        starts = starts[np.linspace(0, len(starts) - 1, limit).astype(int)]
    inputs = np.stack([tokens[s : s + context + 1] for s in starts])
    scored = np.broadcast_to(np.arange(context) >= half, (len(starts), context)) | (starts == 0)[:, None]
    return inputs, scored & (inputs[:, 1:] < 256)
