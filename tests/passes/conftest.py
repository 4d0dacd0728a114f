"""Programs that the tests of prepare and convert share, each captured once."""

import pytest
import torch
from torch.export import ExportedProgram

from graphquant import capture
from tests.passes.modules import ThreeInputs, exported
from tests.tiny import tiny_llama

torch.set_num_threads(1)  # tensors this small are slower on two cores, and far slower on two busy ones


@pytest.fixture(scope="session")
def one_layer() -> ExportedProgram:
    """A Llama of one layer: 4 heads over 2 KV heads, and a head_dim of 16 that is not hidden / heads = 8."""
    return capture(tiny_llama(num_hidden_layers=1, head_dim=16))


@pytest.fixture(scope="session")
def eager_program() -> ExportedProgram:
    """Two layers whose attention is spelled out: matmul, mask of −inf, softmax, matmul."""
    return capture(tiny_llama(attn_implementation="eager"))


@pytest.fixture(scope="session")
def heads_4_4() -> ExportedProgram:
    return capture(tiny_llama(num_hidden_layers=1, num_key_value_heads=4))


@pytest.fixture(scope="session")
def heads_4_1() -> ExportedProgram:
    return capture(tiny_llama(num_hidden_layers=1, num_key_value_heads=1))


@pytest.fixture(scope="session")
def bfloat16_program() -> ExportedProgram:
    return capture(tiny_llama(num_hidden_layers=1).to(torch.bfloat16))


@pytest.fixture(scope="session")
def float16_program() -> ExportedProgram:
    return capture(tiny_llama(num_hidden_layers=1).to(torch.float16))


@pytest.fixture(scope="session")
def three_inputs() -> ExportedProgram:
    """Attention whose query, key and value inputs are three inputs of the program."""
    return exported(ThreeInputs)
