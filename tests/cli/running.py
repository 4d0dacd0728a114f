"""Running the command line in process, and what must hold of its every failure."""

from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner, Result

from graphquant.cli import app


@dataclass(frozen=True)
class Workspace:
    """The files that tests share."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "tiny"

    @property
    def captured(self) -> Path:
        return self.folder / "captured.pt2"

    @property
    def quantized(self) -> Path:
        return self.folder / "int8.pt2"

    @property
    def calibration(self) -> Path:
        return self.folder / "calibration.safetensors"

    @property
    def data(self) -> tuple[object, ...]:
        return ("--data", self.folder / "text.txt", "--length", 8)

    def quantize(
        self, *, output: object = "out.pt2", config: tuple[object, ...] = ("--preset", "int8-kv-tensor")
    ) -> tuple[object, ...]:
        """The shortest run of quantize: of the captured program, as no time is spent on capturing it."""
        return ("quantize", self.captured, "--tokenizer", self.model, *config, "--output", output, *self.data)


def run(*args: object, code: int = 0) -> Result:
    """Run a command that must end with ``code``."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    assert result.exit_code == code, result.output
    return result


def error_of(*args: object, code: int = 1) -> str:
    """Run a command that must fail with one line, and leave the working directory as it was."""
    before = _contents()
    result = run(*args, code=code)
    lines = result.stderr.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:]
    assert "Traceback" not in result.output
    assert result.stdout == ""
    assert _contents() == before
    return lines[-1].removeprefix("error: ")


def usage_error_of(*args: object) -> str:
    """Run a command that typer must refuse."""
    before = _contents()
    result = run(*args, code=2)
    assert result.stdout == ""
    assert _contents() == before
    return " ".join(result.stderr.split()).split("Error: ")[1]


def _contents() -> dict[Path, bytes | None]:
    return {path: path.read_bytes() if path.is_file() else None for path in Path().rglob("*")}
