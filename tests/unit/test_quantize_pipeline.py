"""The walk over a model: the right matrices, from where a run that was killed stopped, always the same bytes."""

from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pytest
from tiny_models import tiny_checkpoint, tiny_config

from paceline.errors import CheckpointError, OutputError, ParameterError
from paceline.quantize import pipeline, work
from paceline.quantize.forward import SequenceForward, checkpoint_values
from paceline.quantize.pipeline import FinishedModel, Settings, quantize_model
from paceline.quantize.recipe import RECIPES, Recipe, RecipeName
from paceline.quantize.rtn import quantize_rtn
from paceline.quantize.scheme import Scheme
from paceline.quantize.work import WorkDirectory

TOKENS = np.random.default_rng(0).integers(0, 75, (8, 64)).astype(np.int32)
GPTQ = Scheme("gptq", 3, 32)
MATRICES = 14


def run(path: Path, settings: Settings, *, interleaved: bool = True) -> FinishedModel:
    checkpoint = tiny_checkpoint(tiny_config())
    checkpoint.interleaved_rope = interleaved
    with WorkDirectory(path, settings.key(b"tiny")) as directory:
        return quantize_model(checkpoint, settings, directory)


def codes(model: FinishedModel) -> dict[str, bytes]:
    found = {}
    for name in model.checkpoint.names():
        matrix = model.matrix(name)
        if matrix is not None:
            found[name] = matrix.codes.tobytes() + matrix.scale.tobytes() + matrix.zero.tobytes()
    assert len(found) == MATRICES
    return found


def hidden_error(model: FinishedModel) -> float:
    """Relative squared error of the residual stream after the last layer."""
    states = []
    for changed in (lambda name: None, lambda name: m.values() if (m := model.matrix(name)) else None):
        forward = SequenceForward(model.checkpoint, changed)
        values: dict[str, np.ndarray] = {}
        for stage in forward.stages:
            forward.run(stage, values, TOKENS)
        states.append(values[forward.graph.hidden.name])
    return float(((states[0] - states[1]) ** 2).sum() / (states[0] ** 2).sum())


def test_rounding_needs_no_tokens(tmp_path: Path) -> None:
    scheme = Scheme("rtn", 4, 32)
    model = run(tmp_path / "w", Settings(scheme, Recipe()))
    name = "blk.1.ffn_down.weight"
    matrix = model.matrix(name)
    assert matrix is not None
    expected = quantize_rtn(checkpoint_values(model.checkpoint, name), scheme, 32)
    np.testing.assert_array_equal(matrix.values(), expected.values())
    for other in ("token_embd.weight", "blk.0.attn_norm.weight"):
        assert model.matrix(other) is None
        np.testing.assert_array_equal(model.values(other), checkpoint_values(model.checkpoint, other))


@pytest.mark.parametrize("interleaved", [True, False])
def test_every_recipe_is_better_than_rounding(tmp_path: Path, interleaved: bool) -> None:
    rounded = run(tmp_path / "rtn", Settings(Scheme("rtn", 3, 32), Recipe()), interleaved=interleaved)
    limit = hidden_error(rounded)
    for name in RECIPES:
        model = run(tmp_path / name, Settings(GPTQ, Recipe.named(name), TOKENS), interleaved=interleaved)
        assert hidden_error(model) < 0.8 * limit, name


def test_the_order_of_rows_in_the_file_does_not_matter(tmp_path: Path) -> None:
    """One model, in a file whose rotary pairs are neighbours and in one that has them half a head apart."""
    settings = Settings(GPTQ, Recipe(asymmetric=True), TOKENS)
    neighbours = run(tmp_path / "a", settings)
    checkpoint = tiny_checkpoint(tiny_config())
    checkpoint.interleaved_rope = False
    config = checkpoint.config
    rows: dict[str, np.ndarray] = {}
    for name, raw in checkpoint.tensors.items():
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name.split(".")[-2])
        if heads is not None:
            rows[name] = np.arange(raw.shape[0]).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
            values = raw.data.view(np.float32).reshape(raw.shape)
            values[:] = values[rows[name]].copy()
    with WorkDirectory(tmp_path / "b", settings.key(b"")) as directory:
        apart = quantize_model(checkpoint, settings, directory)
    assert len(rows) == 4
    for name in codes(neighbours):
        one, other = neighbours.matrix(name), apart.matrix(name)
        assert one is not None
        assert other is not None
        # The same sums in another order: a tie may fall the other way.
        equal = one.codes[rows[name]] == other.codes if name in rows else one.codes == other.codes
        assert equal.mean() > 0.99, name


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_that_was_cut_short_ends_with_the_bytes_of_a_whole_one(
    tmp_path: Path, name: RecipeName, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(GPTQ, Recipe.named(name), TOKENS)
    expected = codes(run(tmp_path / "whole", settings))
    count = 0

    def stop_later(*arguments: object) -> object:
        nonlocal count
        count += 1
        if count == 4:
            raise KeyboardInterrupt
        return quantize(*arguments)  # type: ignore[arg-type]

    quantize = pipeline.quantize_together
    monkeypatch.setattr(pipeline, "quantize_together", stop_later)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "cut", settings)
    assert codes(run(tmp_path / "cut", settings)) == expected
    assert count == 4 + 8 - 3  # the stages that were finished are not done again


def test_damaged_or_foreign_work_is_done_again(tmp_path: Path) -> None:
    settings = Settings(GPTQ, Recipe(), TOKENS)
    expected = codes(run(tmp_path / "w", settings))
    for damage in (lambda data: data[:-1], lambda data: data[:40] + b"x" + data[41:], lambda data: b""):
        part = tmp_path / "w" / "stage-0003"
        part.write_bytes(damage(part.read_bytes()))
        assert codes(run(tmp_path / "w", settings)) == expected
    other = Settings(Scheme("gptq", 3, 32, symmetric=True), Recipe(), TOKENS)
    assert codes(run(tmp_path / "w", other)) == codes(run(tmp_path / "fresh", other)) != expected


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    settings = Settings(GPTQ, Recipe(), TOKENS)
    with (
        WorkDirectory(tmp_path / "w", "key"),
        pytest.raises(OutputError, match="another process"),
    ):
        run(tmp_path / "w", settings)
    run(tmp_path / "w", settings)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="unfinished work"):
        WorkDirectory(tmp_path / "file", "key")


def test_a_disk_that_is_full_loses_no_finished_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> None:
        if len(list(path.parent.iterdir())) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, data)

    settings = Settings(GPTQ, Recipe(), TOKENS)
    write = work._write
    monkeypatch.setattr(work, "_write", full)
    with pytest.raises(OutputError, match="No space left on device; the same command goes on"):
        run(tmp_path / "w", settings)
    assert sorted(path.name for path in (tmp_path / "w").iterdir()) == ["key", "stage-0001", "stage-0002", "stage-0003"]
    monkeypatch.undo()
    assert codes(run(tmp_path / "w", settings)) == codes(run(tmp_path / "whole", settings))
    (tmp_path / "other" / "letters").mkdir(parents=True)
    with pytest.raises(OutputError, match="cannot keep unfinished work"):
        WorkDirectory(tmp_path / "other", "key")


def test_every_setting_is_in_the_key() -> None:
    base = Settings(GPTQ, Recipe(), TOKENS)
    others = [
        Settings(Scheme("gptq", 4, 32), Recipe(), TOKENS),
        Settings(GPTQ, Recipe(sweeps=1), TOKENS),
        Settings(GPTQ, Recipe(), TOKENS[:-1]),
        Settings(GPTQ, Recipe(), TOKENS.reshape(4, 128)),
        Settings(GPTQ, Recipe()),
    ]
    keys = [base.key(b"a"), base.key(b"b"), *(settings.key(b"a") for settings in others)]
    assert len(set(keys)) == len(keys)
    assert base.key(b"a") == Settings(GPTQ, Recipe(), TOKENS.copy()).key(b"a")


def test_a_group_that_does_not_divide_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="possible are 64 or 32 or channel"):
        run(tmp_path / "w", Settings(Scheme("gptq", 4, 128), Recipe(), TOKENS))
    assert [path.name for path in (tmp_path / "w").iterdir()] == ["key"]


PLAIN = Settings(GPTQ, Recipe.named("plain"), TOKENS)
"""It alone runs the quantised model only."""
EVERY_METHOD = [
    PLAIN,
    *(Settings(GPTQ, Recipe.named(name), TOKENS) for name in RECIPES if name != "plain"),
    Settings(Scheme("awq", 4, 32), Recipe(), TOKENS),
    Settings(Scheme("smoothquant", 8, None, True), Recipe(), TOKENS),
]


@pytest.mark.parametrize("settings", EVERY_METHOD)
def test_a_token_whose_embedding_is_zero_has_a_finite_weight(tmp_path: Path, settings: Settings) -> None:
    checkpoint = tiny_checkpoint(tiny_config())
    checkpoint.tensors["token_embd.weight"].data.view(np.float32).reshape(75, -1)[TOKENS[:, 0]] = 0
    with WorkDirectory(tmp_path / "w", settings.key(b"")) as directory:
        model = quantize_model(checkpoint, settings, directory)
    assert max(model.error(name) for name in codes(model)) < 0.5


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero)")
@pytest.mark.parametrize("settings", [settings for settings in EVERY_METHOD if settings != PLAIN])
def test_values_that_leave_the_range_of_float32_are_an_error(tmp_path: Path, settings: Settings) -> None:
    checkpoint = tiny_checkpoint(tiny_config())
    for name in ("blk.0.ffn_up.weight", "blk.0.ffn_down.weight"):
        checkpoint.tensors[name].data.view(np.float32)[:] *= 1e25
    with (
        WorkDirectory(tmp_path / "w", settings.key(b"")) as directory,
        pytest.raises(CheckpointError, match=r"blk\..*calibration text are infinite"),
    ):
        quantize_model(checkpoint, settings, directory)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path: Path, value: float) -> None:
    checkpoint = tiny_checkpoint(tiny_config())
    name = "blk.1.attn_k.weight"
    checkpoint.tensors[name].data.view(np.float32)[3] = value
    settings = Settings(Scheme("rtn", 4, 32), Recipe())
    with pytest.raises(CheckpointError, match=name):
        quantize_model(checkpoint, settings, WorkDirectory(tmp_path / "w", settings.key(b"")))
