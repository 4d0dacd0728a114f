"""Capture: one signature, dynamic dims, eager's very numbers, and a model that is afterwards as it was before."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from transformers import LlamaForCausalLM, LlamaModel

from graphquant.capture import capture
from graphquant.errors import CaptureError
from graphquant.graph import ops
from tests.tiny import VOCABULARY, tiny_batch, tiny_llama


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(num_hidden_layers=1)


@pytest.fixture(scope="module")
def program(model: LlamaForCausalLM) -> ExportedProgram:
    return capture(model)


def test_the_signature(program: ExportedProgram) -> None:
    assert program.graph_signature.user_inputs == ("input_ids", "attention_mask")
    (logits,) = program.graph_signature.user_outputs
    value = next(node for node in program.graph.nodes if node.name == logits).meta["val"]
    assert value.shape[2] == VOCABULARY
    assert all(isinstance(dim, torch.SymInt) for dim in value.shape[:2])
    assert [limits.lower for limits in program.range_constraints.values()] == [1, 1]


@pytest.mark.parametrize(("rows", "length", "padding"), [(1, 1, 0), (3, 77, 0), (3, 77, 5), (2, 128, 100), (1, 9, 8)])
def test_every_shape_gives_what_eager_gives(
    model: LlamaForCausalLM, program: ExportedProgram, rows: int, length: int, padding: int
) -> None:
    batch = tiny_batch(rows, length, padding)
    with torch.no_grad():
        expected = model(**batch, use_cache=False).logits
        assert torch.equal(program.module()(**batch), expected)


def test_padding_makes_a_difference(program: ExportedProgram) -> None:
    """Were the mask not captured, the test above would pass with it ignored on both sides."""
    padded, whole = tiny_batch(2, 9, padding=4), tiny_batch(2, 9)
    assert torch.equal(padded["input_ids"], whole["input_ids"])
    with torch.no_grad():
        run = program.module()
        assert not torch.equal(run(**padded)[1], run(**whole)[1])
        assert torch.equal(run(**padded)[0], run(**whole)[0])


def state(model: LlamaForCausalLM) -> dict[str, Any]:
    """Everything about a model that a capture might have changed."""
    return {
        "class": type(model),
        "forward": (model.forward.__func__, model.forward.__self__ is model),
        "config": copy.deepcopy(model.config.to_dict()),
        "generation_config": copy.deepcopy(model.generation_config.to_dict()),
        "implementation": model.config._attn_implementation,
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "classes": {name: type(module) for name, module in model.named_modules()},
        "identity": {name: id(tensor) for name, tensor in model.state_dict(keep_vars=True).items()},
        "hooks": [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        "training": [module.training for module in model.modules()],
        "gradients": [parameter.requires_grad for parameter in model.parameters()],
    }


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_llama(num_hidden_layers=1, tie_word_embeddings=True)
    before, values = state(model), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        logits = model(**tiny_batch(2, 5)).logits
    capture(model)
    assert state(model) == before
    assert all(torch.equal(values[name], tensor) for name, tensor in model.state_dict().items())
    with torch.no_grad():
        again = model(**tiny_batch(2, 5), use_cache=True)
    assert torch.equal(again.logits, logits)
    assert again.past_key_values is not None


def test_names_are_the_models_own(model: LlamaForCausalLM, program: ExportedProgram) -> None:
    assert set(program.state_dict) == set(model.state_dict())
    assert all(torch.equal(program.state_dict[name], tensor) for name, tensor in model.state_dict().items())
    paths = {path: cls for node in program.graph.nodes for path, cls in ops.stack(node) if path}
    modules = dict(model.named_modules())
    assert set(paths) <= set(modules)
    assert {path: type(modules[path]).__name__ for path in paths} == paths
    assert {"lm_head", "model.layers.0.self_attn.k_proj", "model.layers.0.mlp"} <= set(paths)


def test_weights_are_shared_with_the_model(model: LlamaForCausalLM, program: ExportedProgram) -> None:
    for name, tensor in model.named_parameters():
        assert program.state_dict[name].data_ptr() == tensor.data_ptr()


def test_tied_embeddings_stay_tied() -> None:
    program = capture(tiny_llama(num_hidden_layers=1, tie_word_embeddings=True))
    embeddings, head = (program.state_dict[f"{name}.weight"] for name in ("model.embed_tokens", "lm_head"))
    assert embeddings.data_ptr() == head.data_ptr()
    assert sum(tensor.data_ptr() == head.data_ptr() for tensor in program.module().parameters()) == 1


def test_a_program_is_returned_as_it_is(program: ExportedProgram) -> None:
    assert capture(program) is program


class Mixed(nn.Module):
    """Positional and keyword inputs, nested ones, and one that is no tensor."""

    def forward(self, x: Tensor, pair: list[Tensor], *, scale: Tensor, times: int = 1) -> Tensor:
        return (x + pair[0]) * times @ pair[1] + scale


MIXED_ARGS = (torch.randn(2, 3), [torch.randn(2, 3), torch.randn(3, 4)])


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        (MIXED_ARGS, {"scale": torch.randn(4), "times": 2}),
        (MIXED_ARGS[:1], {"times": 2, "scale": torch.randn(4), "pair": MIXED_ARGS[1]}),
        ((), {"scale": torch.randn(4), "pair": MIXED_ARGS[1], "x": MIXED_ARGS[0], "times": 2}),
    ],
)
def test_a_module_with_examples(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    program = capture(Mixed(), kwargs, example_args=args)
    other = (torch.randn(7, 5), [torch.randn(7, 5), torch.randn(5, 6)])
    named = {"x": other[0], "pair": other[1], "scale": torch.randn(6), "times": 2}
    positional = other[: len(args)]
    rest = {name: named[name] for name in kwargs}
    assert torch.equal(program.module()(*positional, **rest), Mixed()(**named))


@pytest.mark.parametrize("dynamic_shapes", [{"input": {0: Dim("rows", min=2)}}, ({0: Dim.DYNAMIC},)])
def test_dynamic_shapes_of_ones_own(dynamic_shapes: Any) -> None:
    program = capture(nn.Linear(4, 2).eval(), example_args=(torch.randn(3, 5, 4),), dynamic_shapes=dynamic_shapes)
    assert program.module()(torch.randn(9, 5, 4)).shape == (9, 5, 2)
    with pytest.raises(AssertionError):
        program.module()(torch.randn(9, 6, 4))


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x


X = (torch.randn(2, 3, 4),)


@pytest.mark.parametrize(
    ("module", "given", "message"),
    [
        (
            nn.Linear(4, 2),
            {},
            r"Linear is no Hugging Face causal model, so example inputs are needed: capture it by gq\.",
        ),
        (lambda x: x, {"example_args": X}, r"expected an nn\.Module or an ExportedProgram, found function$"),
        (nn.Linear(4, 2), {"example_args": X[0]}, r"example_args is a tensor; expected a tuple of inputs, such"),
        (nn.Linear(4, 2), {"example_kwargs": {"x": X[0]}}, r"the example inputs do not fit Linear\.forward: missing"),
        (nn.Linear(5, 2), {"example_args": X}, r"torch\.export could not export Linear: RuntimeError: a and b must"),
        (Branching(), {"example_args": X}, r"torch\.export could not export Branching: GuardOnDataDependentSymNode:"),
    ],
)
def test_errors_are_one_line(module: Any, given: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError, match=rf"^{message}") as caught:
        capture(module, **given)
    assert "\n" not in str(caught.value)


class Dropping(nn.Module):
    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        output = self.dropout(x)
        return output[0] if isinstance(output, tuple) else output


@pytest.mark.parametrize(
    "dropout",
    [nn.Dropout(0.1), nn.Dropout1d(0.1), nn.AlphaDropout(0.1), nn.LSTM(4, 4, num_layers=2, dropout=0.1)],
    ids=lambda module: type(module).__name__,
)
@pytest.mark.filterwarnings("ignore:The tensor attributes self.dropout._flat_weights")
def test_dropout_in_training_mode(dropout: nn.Module) -> None:
    message = r"^Dropping is in training mode, and dropout would be captured: call model\.eval\(\)$"
    with pytest.raises(CaptureError, match=message):
        capture(Dropping(dropout), example_args=X)


def test_a_backbone_without_a_head_needs_an_example(model: LlamaForCausalLM) -> None:
    assert isinstance(model.model, LlamaModel)
    with pytest.raises(CaptureError, match=r"^LlamaModel is no Hugging Face causal model"):
        capture(model.model)


def test_dropout_inside_of_attention() -> None:
    """A Llama has no dropout module: in training mode its attention op itself drops weights."""
    model = tiny_llama(num_hidden_layers=1, attention_dropout=0.1).train()
    with pytest.raises(CaptureError, match=r"^LlamaForCausalLM is in training mode, and dropout would be captured"):
        capture(model)


def test_training_mode_without_dropout_is_no_fault() -> None:
    module = Dropping(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0)))
    assert module.training
    assert torch.equal(capture(module, example_args=X).module()(*X), module(*X))
    assert module.training
