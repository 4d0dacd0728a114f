"""A calibration is a value: it saves, loads, merges, answers other configs, and refuses what it cannot answer."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.export import ExportedProgram

import graphquant as gq
from graphquant.config import KVCacheScheme
from graphquant.errors import CalibrationError, DataError, NotCalibratedError, OutputError
from tests.tiny import tiny_batch, tiny_batches, tiny_llama

KEYS = "model.layers.0.self_attn.key_states"


def config(**args: Any) -> gq.QuantizationConfig:
    """Every layer's keys and values, quantized alike."""
    both = gq.QuantizationArgs(**args)
    return gq.QuantizationConfig(kv_cache_scheme=KVCacheScheme(key=both, value=both))


def calibrated(program: ExportedProgram, batches: list[Any], **args: Any) -> gq.Calibration:
    return gq.calibrate(gq.prepare(program, config(**args)), batches, progress=False)


def same(left: gq.Calibration, right: gq.Calibration) -> bool:
    return list(left) == list(right) and all(
        torch.equal(value, right[key].state[name]) for key in left for name, value in left[key].state.items()
    )


@pytest.mark.parametrize("observer", ["minmax", "percentile", "mse", "moving_average"])
def test_save_and_load(tiny_program: ExportedProgram, tmp_path: Path, observer: str) -> None:
    calibration = calibrated(tiny_program, tiny_batches(), observer=observer)
    calibration.save(tmp_path / "c.safetensors")
    loaded = gq.Calibration.load(tmp_path / "c.safetensors")
    assert same(calibration, loaded)
    assert [e.observer for e in loaded.entries] == [e.observer for e in calibration.entries]
    assert repr(loaded) == "Calibration(4 tensors, 36 tokens)"


@pytest.mark.parametrize("observer", ["minmax", "percentile", "mse"])
def test_merge_is_having_seen_both(tiny_program: ExportedProgram, observer: str) -> None:
    first, second = tiny_batches()
    merged = calibrated(tiny_program, [first], observer=observer).merge(
        calibrated(tiny_program, [second], observer=observer)
    )
    assert same(merged, calibrated(tiny_program, [first, second], observer=observer))


def test_one_calibration_answers_every_static_strategy_width_and_symmetry(tiny_program: ExportedProgram) -> None:
    calibration = calibrated(tiny_program, tiny_batches())
    for strategy in ("tensor", "channel", "attn_head", "attn_head_channel", "group"):
        for settings in ({"num_bits": 4, "symmetric": False}, {"num_bits": 8, "type": "float"}):
            args = {"strategy": strategy, "group_size": 4 if strategy == "group" else None} | settings
            once = gq.convert(tiny_program, calibration, config(**args))
            again = gq.convert(tiny_program, calibrated(tiny_program, tiny_batches(), **args), config(**args))
            for name, value in once.state_dict.items():
                assert torch.equal(value, again.state_dict[name])


def test_another_model_is_refused(tiny_program: ExportedProgram) -> None:
    other = gq.capture(tiny_llama(num_hidden_layers=2, head_dim=16))
    with pytest.raises(
        CalibrationError, match=r"\[B, 2, S, 16\] here and was calibrated as \[B, 2, S, 8\]: this calib"
    ):
        gq.convert(other, calibrated(tiny_program, tiny_batches()), config())


def test_a_site_that_was_not_observed_is_refused(tiny_program: ExportedProgram) -> None:
    with pytest.raises(CalibrationError, match=r"no statistics of model\.layers\.0\.self_attn\.query_states"):
        gq.convert(tiny_program, calibrated(tiny_program, tiny_batches()), gq.preset("int8-qkv-attn-head"))


def test_statistics_that_cannot_answer_are_refused(tiny_program: ExportedProgram) -> None:
    with pytest.raises(CalibrationError, match=r"calibrated with observer 'minmax', whose .* cannot answer 'mse'"):
        gq.convert(tiny_program, calibrated(tiny_program, tiny_batches()), config(observer="mse"))
    average = calibrated(tiny_program, tiny_batches(), observer="moving_average")
    with pytest.raises(CalibrationError, match=r"cannot answer strategy 'channel'"):
        gq.convert(tiny_program, average, config(observer="moving_average", strategy="channel"))


def test_different_sites_or_observers_do_not_merge(tiny_program: ExportedProgram) -> None:
    one = calibrated(tiny_program, tiny_batches())
    queries = gq.calibrate(gq.prepare(tiny_program, gq.preset("int8-qkv-attn-head")), tiny_batches(), progress=False)
    with pytest.raises(CalibrationError, match=r"not in both: model\.layers\.0\.self_attn\.query_states"):
        one.merge(queries)
    with pytest.raises(CalibrationError, match="only like statistics merge"):
        one.merge(calibrated(tiny_program, tiny_batches(), observer="mse"))


def test_files_that_are_no_calibration(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot read the calibration .*none"):
        gq.Calibration.load(tmp_path / "none")
    (tmp_path / "damaged").write_bytes(b"\x00" * 20)
    with pytest.raises(OutputError, match=r"cannot read the calibration .*damaged"):
        gq.Calibration.load(tmp_path / "damaged")
    save_file({"weight": torch.zeros(2)}, tmp_path / "other")
    with pytest.raises(OutputError, match="is a safetensors file but no graphquant calibration"):
        gq.Calibration.load(tmp_path / "other")


def test_padding_never_counts(tiny_program: ExportedProgram) -> None:
    plain = tiny_batch(2, 6)
    garbage = torch.randint(0, 64, (2, 5))
    for side in ("right", "left"):
        parts = (plain["input_ids"], garbage) if side == "right" else (garbage, plain["input_ids"])
        masks = (torch.ones(2, 6), torch.zeros(2, 5)) if side == "right" else (torch.zeros(2, 5), torch.ones(2, 6))
        padded = {"input_ids": torch.cat(parts, 1), "attention_mask": torch.cat(masks, 1).long()}
        values = "model.layers.0.self_attn.value_states"  # layer 0's values depend on no position
        left, right = calibrated(tiny_program, [plain])[values], calibrated(tiny_program, [padded])[values]
        assert left.tokens == right.tokens == 12
        assert torch.allclose(left.state["max"], right.state["max"], rtol=1e-5)
        assert torch.allclose(left.state["min"], right.state["min"], rtol=1e-5)


def test_calibrate_goes_on_and_takes_generators(tiny_program: ExportedProgram) -> None:
    prepared = gq.prepare(tiny_program, config())
    gq.calibrate(prepared, tiny_batches()[:1], progress=False)
    total = gq.calibrate(prepared, (batch for batch in tiny_batches()[1:]), progress=False)
    assert same(total, calibrated(tiny_program, tiny_batches()))
    assert same(total, gq.calibration_of(prepared))


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "there is not a single batch"),
        (tiny_batches()[0], "put this one into a list"),
        ([torch.zeros(1)], r"batch 0 is a Tensor; expected a dict such as"),
        (
            [*tiny_batches(), {"ids": torch.ones(1, 2)}],
            r"^batch 2 has ids; the program takes input_ids, attention_mask$",
        ),
        (
            [{"input_ids": torch.ones(1, 2), "attention_mask": torch.ones(1, 2, dtype=torch.int64)}],
            r"^batch 0 \(input_ids float32 \[1, 2\], attention_mask int64 \[1, 2\]\) cannot be run: Expected tensor",
        ),
        (
            [{name: value[:, :3] if name == "input_ids" else value for name, value in tiny_batches()[0].items()}],
            r"^batch 0 \(input_ids int64 \[3, 3\], attention_mask int64 \[3, 11\]\) cannot be run: \w",
        ),
    ],
    ids=["none", "a dict", "a tensor", "other names", "another dtype", "shapes that differ"],
)
def test_batches_that_cannot_be(tiny_program: ExportedProgram, batches: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        gq.calibrate(gq.prepare(tiny_program, config()), batches, progress=False)


def test_nothing_observed_is_named(tiny_program: ExportedProgram) -> None:
    prepared = gq.prepare(tiny_program, config())
    with pytest.raises(NotCalibratedError, match=rf"4 sites have observed nothing \({KEYS}, .* and 1 more\): run"):
        gq.convert(prepared)


def test_progress_can_be_turned_off(tiny_program: ExportedProgram, capsys: pytest.CaptureFixture[str]) -> None:
    calibrated(tiny_program, tiny_batches())
    assert capsys.readouterr().err == ""


def test_a_merge_of_moving_averages_is_having_seen_both(tiny_program: ExportedProgram) -> None:
    first, second = tiny_batches()
    merged = calibrated(tiny_program, [first], observer="moving_average").merge(
        calibrated(tiny_program, [second], observer="moving_average")
    )
    together = calibrated(tiny_program, [first, second], observer="moving_average")
    for key in together:
        for name, value in together[key].state.items():
            torch.testing.assert_close(merged[key].state[name], value)


def test_a_merge_leaves_both_as_they_were(tiny_program: ExportedProgram) -> None:
    first, second = (calibrated(tiny_program, [batch]) for batch in tiny_batches())
    merged = first.merge(second)
    assert (first[KEYS].tokens, second[KEYS].tokens, merged[KEYS].tokens) == (29, 7, 36)
    assert merged[KEYS].amax == max(first[KEYS].amax, second[KEYS].amax)


@pytest.mark.parametrize("damage", ["cut", "no sites", "no json", "a tensor is missing", "unknown observer"])
def test_a_damaged_file_is_named(tiny_program: ExportedProgram, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "c.safetensors"
    calibrated(tiny_program, tiny_batches()).save(path)
    with safe_open(path, framework="pt") as file:
        metadata, tensors = dict(file.metadata()), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-40])
    else:
        if damage == "no sites":
            del metadata["sites"]
        elif damage == "no json":
            metadata["sites"] = metadata["sites"][:-1]
        elif damage == "unknown observer":
            metadata["sites"] = metadata["sites"].replace("minmax", "maxmin")
        else:
            del tensors["1.max"]
        save_file(tensors, path, metadata=metadata)
    with pytest.raises(OutputError, match=r"^cannot read the calibration .*c\.safetensors: \w+: "):
        gq.Calibration.load(path)


def test_an_interrupted_save_leaves_the_old_file(
    tiny_program: ExportedProgram, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "c.safetensors"
    old, new = (calibrated(tiny_program, [batch]) for batch in tiny_batches())
    old.save(path)

    def half(tensors: Any, target: Path, metadata: Any) -> None:
        target.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(gq.calibration, "save_file", half)
        with pytest.raises(KeyboardInterrupt):
            new.save(path)
    assert same(gq.Calibration.load(path), old)
    assert [file.name for file in tmp_path.iterdir()] == ["c.safetensors"]
    new.save(path)
    assert same(gq.Calibration.load(path), new)


def test_a_path_that_cannot_be_written_is_named(tiny_program: ExportedProgram, tmp_path: Path) -> None:
    calibration = calibrated(tiny_program, tiny_batches())
    with pytest.raises(OutputError, match=r"there is no directory .*none; create it first"):
        calibration.save(tmp_path / "none" / "c.safetensors")
    with pytest.raises(OutputError, match="it is a directory"):
        calibration.save(tmp_path)


def test_a_calibration_does_not_change_with_its_module(tiny_program: ExportedProgram) -> None:
    prepared = gq.prepare(tiny_program, config())
    first = gq.calibrate(prepared, tiny_batches()[:1], progress=False)
    before = {key: {name: value.clone() for name, value in first[key].state.items()} for key in first}
    gq.calibrate(prepared, tiny_batches()[1:], progress=False)
    for key, state in before.items():
        assert all(torch.equal(first[key].state[name], value) for name, value in state.items())
    with pytest.raises(KeyError):
        first["model.layers.9.self_attn.key_states"]
