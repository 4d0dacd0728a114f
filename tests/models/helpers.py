from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphquant.errors import ModelError

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(ModelError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text


def same_weights(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)
