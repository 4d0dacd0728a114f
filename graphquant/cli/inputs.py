"""What commands read: models, saved programs, configurations, and text as rows of tokens."""

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
import typer
from torch import Tensor, nn
from torch.export import ExportedProgram

from graphquant.capture import capture
from graphquant.cli.console import Console
from graphquant.config import QuantizationConfig, preset
from graphquant.config.reading import located
from graphquant.data import batches, read_text, split_rows, token_rows, topics_text
from graphquant.errors import ConfigError, DataError, ModelError
from graphquant.graph import find_attention
from graphquant.loops import vocabulary_of
from graphquant.models import check_finite_weights, load_model, load_tokenizer
from graphquant.models.weights import failing_as
from graphquant.plan.plan import require_attention

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Batches = list[dict[str, Tensor]]


@dataclass(frozen=True)
class Texts:
    """A text, and how it is cut: so many rows to calibrate on and as many to judge by, their length, rows at a time."""

    text: str
    samples: int
    length: int
    batch_size: int

    @classmethod
    def read(cls, data: Path | None, samples: int, length: int, batch_size: int) -> "Texts":
        """Read a file, or without one Python's help topics.

        Raises:
            DataError: the file is missing, empty, or not text.
        """
        return cls(topics_text() if data is None else read_text(data), samples, length, batch_size)


@dataclass(frozen=True)
class Source:
    """What MODEL named: a module, or a saved program, which has a tokenizer only if one was named beside it."""

    model: nn.Module | ExportedProgram
    tokenizer: "PreTrainedTokenizerBase | None"
    name: str

    @classmethod
    def load(cls, model: str, tokenizer: str | None, dtype: str, console: Console) -> "Source":
        """Load what MODEL names and check that its weights are finite.

        Raises:
            ModelError: it cannot be loaded, or a weight is NaN or Inf.
        """
        with console.working(f"loading {model}"):
            named = None if tokenizer is None else load_tokenizer(tokenizer)
            if Path(model).suffix.lower() == ".pt2":
                if dtype != "float32":
                    raise ModelError(f"{model} is a saved program, whose dtype is fixed: leave out --dtype {dtype}")
                program = load_program(Path(model))
                # All that the check asks of a module is named_parameters, which a program has too.
                check_finite_weights(cast(nn.Module, program))
                return cls(program, named, Path(model).stem)
            loaded = load_model(model, dtype=getattr(torch, dtype))
            return cls(loaded.model, loaded.tokenizer if named is None else named, loaded.name)

    def rows(self, texts: Texts) -> tuple[Tensor, Tensor]:
        """Calibration and evaluation rows ``[N, S]``: for the same text and counts the same rows in every command.

        Raises:
            DataError: there is no tokenizer, the text is too short, or the rows are longer than the model's positions.
            NoAttentionError: there is neither a tokenizer nor any attention to quantize.
        """
        if self.tokenizer is None:
            assert isinstance(self.model, ExportedProgram)
            require_attention(find_attention(self.model))  # the deeper reason first
            raise DataError(f"{self.name} is a saved program, which has no tokenizer: name its model with --tokenizer")
        positions = getattr(getattr(self.model, "config", None), "max_position_embeddings", None)
        if isinstance(positions, int) and texts.length > positions:
            raise DataError(
                f"rows of {texts.length} tokens are asked for, and {self.name} has {positions} positions: give a "
                f"--length of at most {positions}"
            )
        return split_rows(token_rows(self.tokenizer, texts.text, texts.length), texts.samples, texts.samples)

    def program(self, console: Console) -> ExportedProgram:
        """The program, captured if need be.

        Raises:
            CaptureError: torch.export cannot export the model.
        """
        if isinstance(self.model, ExportedProgram):
            return self.model
        with console.working(f"capturing {self.name}"):
            return capture(self.model)


def load_program(path: Path) -> ExportedProgram:
    """Load what ``torch.export.save`` wrote.

    Raises:
        ModelError: the file is missing, damaged, or something else.
    """
    check_program(path)
    with failing_as(f"{path} is damaged, or no file of torch.export.save: write it anew"):
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()  # torch does not compare checksums, and would load a wrong weight
        if broken is not None:
            raise ModelError(f"{path} is damaged: {broken} in it does not match its checksum; write it anew")
        return torch.export.load(path)


def check_program(path: Path) -> None:
    """Refuse a path that is no file of ``torch.export.save`` by its name.

    Raises:
        ModelError: the file is missing, or does not end in .pt2.
    """
    if not path.is_file():
        raise ModelError(f"{path} {'is a folder' if path.exists() else 'does not exist'}: expected a .pt2 file")
    if path.suffix.lower() != ".pt2":
        raise ModelError(f"{path} does not end in .pt2: expected a file of torch.export.save")


def read_config(path: Path) -> QuantizationConfig:
    """Read a recipe (.yaml, .yml), or the JSON form of a configuration (.json).

    Raises:
        ConfigError: the file cannot be read, or its content means nothing.
    """
    suffix = path.suffix.lower()
    if suffix in (".yaml", ".yml"):
        return QuantizationConfig.from_recipe(path)
    with located(str(path)):
        if suffix != ".json":
            raise ConfigError(f"ends in {path.suffix!r}; expected a .yaml, .yml or .json file")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"is not JSON: {error}") from None
        return QuantizationConfig.from_dict(data)


def config_of(preset_name: str | None, recipe: Path | None) -> QuantizationConfig:
    """The configuration of ``--preset`` or ``--recipe``, of which there must be one.

    Raises:
        ConfigError: there is no such preset, or the recipe cannot be read or means nothing.
    """
    if preset_name is not None and recipe is None:
        return preset(preset_name)
    if recipe is not None and preset_name is None:
        return read_config(recipe)
    raise typer.BadParameter("give one of the two", param_hint="--preset, --recipe")


def text_inputs(program: ExportedProgram, name: str) -> set[str]:
    """Which of ``input_ids`` and ``attention_mask`` a program takes.

    Raises:
        DataError: it takes something else, and no text.
    """
    takes = [str(user_input) for user_input in program.graph_signature.user_inputs]
    if "input_ids" not in takes or not {"input_ids", "attention_mask"}.issuperset(takes):
        raise DataError(
            f"{name} takes {', '.join(takes) or 'no input'}; expected input_ids and attention_mask, to give it text"
        )
    return set(takes)


def batches_of(rows: Tensor, batch_size: int, programs: Mapping[str, ExportedProgram]) -> Batches:
    """Rows as inputs that every one of the programs takes.

    Raises:
        DataError: a program takes no text, not the others' inputs, or has a smaller vocabulary than the tokenizer.
    """
    taken = {name: text_inputs(program, name) for name, program in programs.items()}
    first, inputs = next(iter(taken.items()))
    for name, program in programs.items():
        if taken[name] != inputs:
            raise DataError(f"{name} takes {', '.join(sorted(taken[name]))}, and {first} {', '.join(sorted(inputs))}")
        vocabulary = vocabulary_of(program)
        if vocabulary is not None and int(rows.max()) >= vocabulary:
            raise DataError(
                f"the text has token {int(rows.max())}, and {name} a vocabulary of {vocabulary}: the tokenizer is "
                "another model's"
            )
    return [{name: batch[name] for name in batch if name in inputs} for batch in batches(rows, batch_size)]


def check_same_model(original: ExportedProgram, program: ExportedProgram, name: str) -> None:
    """Refuse a program whose weights are not those of the original: it would seem badly quantized.

    Weights and buffers are compared by name, each in the narrower of the two dtypes.

    Raises:
        ModelError: naming the first that differs, or that they have none in common.
    """
    known, own = ({**dict(one.named_parameters()), **dict(one.named_buffers())} for one in (original, program))
    common = [key for key in own if key in known]
    if not common:
        raise ModelError(f"{name} has no weight of the model it is compared with: give the model that it was made from")
    for key in common:
        value, other = own[key], known[key]
        narrow = min(value.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
        if other.shape != value.shape or not torch.equal(other.to(narrow), value.to(narrow)):
            raise ModelError(
                f"{name} was made from another model: its {key} is not the one of the model it is compared with; give "
                "the model that it was made from"
            )
