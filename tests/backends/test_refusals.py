"""What a backend does not do right is refused by name, before any work."""

import pytest
import torch
from backend_table import Bench

import graphquant as gq
from graphquant.backends import BACKENDS, backend
from graphquant.backends.table import FORMATS, capability_rows, setting
from graphquant.errors import BackendMissingError, DataError, LowerError, UnsupportedError
from graphquant.numerics import STRATEGIES, TensorLayout
from tests.tiny import tiny_llama

REFUSED = [("openvino", "fp8 e4m3"), ("executorch", "fp8 e5m2"), ("iree", "fp8 e4m3"), ("iree", "uint8 asym")]


@pytest.mark.parametrize(("name", "form"), REFUSED)
def test_a_setting_that_would_be_wrong_is_refused_by_name(bench: Bench, name: str, form: str) -> None:
    message = (
        rf"^model\.layers\.0\.self_attn\.\S+: backend '{name}' does not take (fp8_e\dm\d|uint8) [\w ]+ at \[B, .*"
        "; the nearest that works is int8"
    )
    with pytest.raises(UnsupportedError, match=message):
        bench.lowered(name, form)


@pytest.mark.parametrize("name", BACKENDS)
def test_every_setting_is_answered(name: str) -> None:
    for layout in (TensorLayout("projection", 2, 8), TensorLayout("states", 2, 8)):
        for strategy in STRATEGIES:
            for form in ("int8 sym", "int4 asym", "fp8 e4m3"):
                answer = BACKENDS[name].capability(setting(strategy, form), layout)
                assert answer.works == (not answer.reason)
                assert bool(answer.reason) == bool(answer.instead)
    assert [row["format"] for row in capability_rows()] == list(FORMATS)
    assert {row["iree"] for row in capability_rows() if row["format"] == "int8 asym"} == {
        "all but token: its compiler does not end on an asymmetric scale per token"
    }


def test_programs_that_no_check_would_save(bench: Bench) -> None:
    program = gq.capture(tiny_llama(), cache="static", max_cache_len=16)
    with pytest.raises(
        UnsupportedError, match=r"'openvino' loses what a program writes to its buffers \(key_cache_0\)"
    ):
        gq.lower(program, "openvino")
    with pytest.raises(
        UnsupportedError, match=r"'onnxruntime' does not take bfloat16 models; it takes float32, float16"
    ):
        gq.lower(gq.capture(tiny_llama().to(torch.bfloat16)), "onnxruntime")
    with pytest.raises(
        LowerError, match=r"unknown backend 'onnxruntim'; did you mean 'onnxruntime'\? \(known: inductor"
    ):
        gq.lower(bench.program, "onnxruntim")
    with pytest.raises(LowerError, match="expected an ExportedProgram, as convert returns it, found LlamaForCausalLM"):
        gq.lower(tiny_llama(), "inductor")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"examples must be dicts of the program's inputs, input_ids, attention_mask"):
        gq.lower(bench.program, "inductor", examples=[{"ids": torch.ones(1, 1)}])


def test_a_missing_package_names_the_extra(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphquant.backends.base.importlib.util.find_spec", lambda name: None)
    message = r"^backend 'iree' needs iree, .* which is not installed: pip install 'graphquant\[iree\]'$"
    with pytest.raises(BackendMissingError, match=message):
        gq.lower(bench.program, "iree")
    assert backend("inductor").missing() == []
