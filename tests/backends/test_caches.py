"""Programs with a cache as inputs and outputs, and by position, go through the backends like any other."""

from typing import Any

import pytest
import torch

import graphquant as gq
from graphquant.errors import LowerError
from tests.backends.agreement import disagreement
from tests.tiny import tiny_batches, tiny_llama

pytestmark = pytest.mark.slow


def step(rows: int, length: int, past: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows + length + past)
    states = [torch.randn(rows, 2, past, 8, generator=generator) for _ in range(2)]
    return {
        "input_ids": torch.randint(32, 64, (rows, length), generator=generator),
        "attention_mask": torch.ones(rows, past + length, dtype=torch.int64),
        "past_key_values": ((states[0], states[1]),),
    }


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
def test_a_cache_of_inputs_and_outputs(name: str) -> None:
    model, config = tiny_llama(num_hidden_layers=1), gq.preset("int8-kv-attn-head")
    calibration = gq.calibrate(gq.prepare(model, config), tiny_batches(), progress=False)
    quantized = gq.convert(gq.capture(model, cache="inputs"), calibration, config)
    artifact = gq.lower(quantized, name, examples=[step(2, 4, 3), step(1, 1, 5)])
    for size in ((1, 1, 1), (3, 7, 2)):
        found = artifact.run(step(*size))
        assert [list(tensor.shape) for tensor in found[1:]] == [[size[0], 2, size[1] + size[2], 8]] * 2
        assert disagreement(found, quantized, step(*size)) == {}


def test_a_program_with_inputs_by_position_and_the_example_it_was_exported_with() -> None:
    module = torch.nn.Linear(4, 3).eval()
    program = gq.capture(module, example_args=(torch.randn(2, 4),))
    artifact = gq.lower(program, "openvino")
    x = torch.randn(5, 4)
    torch.testing.assert_close(artifact.run({"input": x})[0], module(x).detach())
    assert str(artifact.summary()) == (
        "openvino: the program has no pairs, and was lowered in floating point\nFullyConnected in f32: 1"
    )
    with pytest.raises(LowerError, match=r"^backend 'openvino' has no option max_bach; it has none$"):
        gq.lower(program, "openvino", max_bach=3)
