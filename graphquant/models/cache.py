"""The cache folder, and in it a float32 safetensors copy of every GGUF file that was loaded.

Invariant: what is in the cache is complete: it is written elsewhere and renamed into place.
"""

import contextlib
import hashlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from safetensors import SafetensorError

from graphquant.errors import ModelError
from graphquant.models.weights import failing_as, load_weights, reason

if TYPE_CHECKING:  # its first use imports torchao, which logs: by then the command line has logs off
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def cache_dir() -> Path:
    """Return the folder of downloaded and converted models: GRAPHQUANT_CACHE, or ~/.cache/graphquant."""
    return Path(os.environ.get("GRAPHQUANT_CACHE") or "~/.cache/graphquant").expanduser().absolute()


@contextlib.contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Give a temporary folder inside `parent`, so that a rename out of it stays in one file system and is atomic."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent, prefix="tmp-") as scratch:
            yield Path(scratch)
    except (OSError, SafetensorError) as error:
        remedy = "set GRAPHQUANT_CACHE to a folder with room"
        raise ModelError(f"cannot write to the cache folder {parent} ({reason(error)}): {remedy}") from error


def converted_copy(path: Path, verbose: bool) -> Path:
    """Return the folder of the float32 safetensors copy of a GGUF file, writing it if this very file has none yet."""
    resolved = path.resolve()
    stat = resolved.stat()
    # transformers converts the weights and the tokenizer: a new version must not be given the work of the old one.
    key = f"{resolved}\0{stat.st_size}\0{stat.st_mtime_ns}\0{transformers.__version__}"
    copy = cache_dir() / "converted" / f"{path.stem}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if not _is_complete(copy):
        model, tokenizer = _read_gguf(resolved, verbose)
        with scratch_folder(copy.parent) as scratch:
            model.save_pretrained(scratch / "new")
            tokenizer.save_pretrained(scratch / "new")
            _publish(scratch / "new", copy)
    return copy


def _publish(fresh: Path, copy: Path) -> None:
    try:
        os.replace(fresh, copy)
    except OSError:
        # A folder is not renamed over a full one. If another process was first, its copy is as good as ours; if a
        # cleaner has since taken some files of an old copy, ours takes its place.
        if not _is_complete(copy):
            os.replace(copy, fresh.with_name("old"))
            os.replace(fresh, copy)


def _is_complete(folder: Path) -> bool:
    return all(any(folder.glob(name)) for name in ("config.json", "tokenizer.json", "*.safetensors"))


def _read_gguf(path: Path, verbose: bool) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    print(f"graphquant: dequantizing {path.name} to float32 (once, half a minute for 135M)", file=sys.stderr)
    where: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    # With a GGUF kernel package installed, transformers would keep the weights packed unless told not to.
    options = {"dtype": torch.float32, "quantization_config": transformers.GgufConfig(dequantize=True), **where}
    # One of transformers' two GGUF readers draws a bar that its switch for bars does not reach.
    with contextlib.nullcontext() if verbose else contextlib.redirect_stderr(io.StringIO()):
        # The model first: a damaged file must not be reported as a missing tokenizer.
        with failing_as(
            f"cannot read {path} as GGUF: expected a whole file, of an architecture that transformers knows"
        ):
            model = load_weights(path.parent, options)
        with failing_as(f"{path} holds no usable tokenizer: load the model from a folder that has one"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **where)
    # What is left of the file's quantization makes save_pretrained refuse.
    model.config.__dict__.pop("quantization_config", None)
    for attribute, plain in (("hf_quantizer", None), ("is_quantized", False), ("quantization_method", None)):
        setattr(model, attribute, plain)
    return model, tokenizer
