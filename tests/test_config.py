"""The config file: every key, its type, where a message points, and what the flags change."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanprobe.config import (
    BatchSpec,
    CheckpointSpec,
    Config,
    IgnoreRule,
    LossSpec,
    ModelSpec,
    OptimizerSpec,
    Overrides,
    Settings,
    Tolerance,
    apply_overrides,
    config_document,
    find_config,
    load_config,
    show_config,
)
from nanprobe.errors import UsageError

MODEL = "model: {factory: toy.py:build}\n"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write_config(text: str, name: str = "nanprobe.yaml") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_config


def message_of(path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        load_config(path)
    message = str(caught.value)
    assert "\n" not in message
    assert str(path) in message
    return message


def test_the_smallest_config_has_the_documented_defaults(write: Any) -> None:
    config = load_config(write(MODEL))
    assert config.model == ModelSpec(factory="toy.py:build")
    assert config.checkpoint is None
    assert config.batch is None
    assert config.loss is None
    assert config.settings == Settings()
    settings = config.settings
    assert (settings.mode, settings.autocast_policy, settings.seed, settings.device) == ("autocast", "cuda", 0, "cpu")
    assert (settings.train, settings.backward, settings.loss_scale) == (None, None, None)
    assert config.notes == ()


def test_every_key(write: Any, tmp_path: Path) -> None:
    config = load_config(
        write(
            """
model:
  factory: package.module:Class.make
  kwargs: {width: 8, rate: 1e-3, name: "1e-3"}
checkpoint: {path: sub/model.pt, key: state.model, strip_prefix: module., strict: false}
batch: {path: bad.pt, key: 0, call: single, dim: 1}
loss: {factory: toy.py:loss, kwargs: {weight: 2}}
mode: cast
autocast_policy: cpu
train: false
backward: true
loss_scale: 1024
keep_fp32: ["*.norm", head]
clip_grad_norm: 1.0
optimizer: {name: AdamW, kwargs: {lr: 1e-3}}
seed: 7
ignore:
  - {module: blocks.*, mechanism: routing-flip, why: ties}
tolerances: {bf16: 64, "head": {fp16: 8, bf16: 16}}
device: cuda:1
"""
        )
    )
    assert config.model == ModelSpec(
        factory="package.module:Class.make", kwargs={"width": 8, "rate": 0.001, "name": "1e-3"}
    )
    assert config.checkpoint == CheckpointSpec(
        path=tmp_path / "sub/model.pt", given="sub/model.pt", key="state.model", strip_prefix="module.", strict=False
    )
    assert config.batch == BatchSpec(path=tmp_path / "bad.pt", given="bad.pt", key="0", call="single", dim=1)
    assert config.loss == LossSpec(factory="toy.py:loss", kwargs={"weight": 2})
    assert config.settings == Settings(
        mode="cast",
        autocast_policy="cpu",
        train=False,
        backward=True,
        loss_scale=1024.0,
        keep_fp32=("*.norm", "head"),
        clip_grad_norm=1.0,
        optimizer=OptimizerSpec(name="AdamW", kwargs={"lr": 0.001}),
        seed=7,
        ignore=(IgnoreRule(module="blocks.*", mechanism="routing-flip", why="ties"),),
        tolerances=(
            Tolerance(format="bf16", multiple=64),
            Tolerance(module="head", format="fp16", multiple=8),
            Tolerance(module="head", format="bf16", multiple=16),
        ),
        device="cuda:1",
        batch_dim=1,
    )
    assert config.notes == ()


def test_a_transformers_model(write: Any, tmp_path: Path) -> None:
    config = load_config(write("model:\n  transformers: {path: tiny, class: AutoModel, kwargs: {num_labels: 3}}\n"))
    spec = config.model.transformers
    assert spec is not None
    assert (spec.path, spec.given, spec.class_, spec.kwargs) == (
        tmp_path / "tiny",
        "tiny",
        "AutoModel",
        {"num_labels": 3},
    )


def test_paths_are_relative_to_the_config_unless_absolute(write: Any, tmp_path: Path) -> None:
    config = load_config(write(MODEL + f"batch: ../bad.pt\ncheckpoint: {tmp_path}/model.pt\n"))
    assert config.batch is not None
    assert config.checkpoint is not None
    assert config.batch.path == tmp_path / "../bad.pt"
    assert config.checkpoint.path == tmp_path / "model.pt"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("1E5", 1e5), ("1.5e+3", 1500.0), (".5", 0.5), ("3", 3.0), ("+2.", 2.0), ("65_536", 65536.0)],
)
def test_numbers_in_every_spelling(write: Any, text: str, value: float) -> None:
    config = load_config(write(MODEL + f"loss_scale: {text}\n"))
    assert config.settings.loss_scale == value


@pytest.mark.parametrize(
    ("text", "value"), [("yes", True), ("on", True), ("No", False), ("off", False), ("true", True)]
)
def test_booleans_where_one_is_wanted(write: Any, text: str, value: bool) -> None:
    config = load_config(write(MODEL + f"backward: {text}\ntrain: {text}\n"))
    assert config.settings.backward is value
    assert config.settings.train is value


def test_off_stays_text_where_no_boolean_is_wanted(write: Any) -> None:
    config = load_config(write("model: {factory: toy.py:build, kwargs: {gate: off}}\nkeep_fp32: [on]\n"))
    assert config.model.kwargs == {"gate": "off"}
    assert config.settings.keep_fp32 == ("on",)
    (note,) = config.notes
    assert "model.kwargs.gate" in note
    assert ":1:" in note


def test_other_scalars_that_yaml_1_1_would_change(write: Any) -> None:
    config = load_config(
        write("model: {factory: toy.py:build, kwargs: {a: 1:30, b: 2024-01-01, c: 010, d: .inf, e: ~, f: 0x10}}\n")
    )
    kwargs = config.model.kwargs
    assert kwargs == {"a": "1:30", "b": "2024-01-01", "c": 10, "d": math.inf, "e": None, "f": 16}


def test_a_key_without_a_value_counts_as_not_given(write: Any) -> None:
    config = load_config(write(MODEL + "batch:\nloss_scale: null\nignore: ~\n"))
    assert config.batch is None
    assert config.settings == Settings()


def test_anchors_and_merge_keys_work(write: Any) -> None:
    config = load_config(
        write(
            "model:\n  factory: toy.py:build\n"
            "  kwargs: {one: &base {a: 1, b: 2}, two: {<<: *base, b: 3}, three: *base}\n"
        )
    )
    assert config.model.kwargs == {"one": {"a": 1, "b": 2}, "two": {"a": 1, "b": 3}, "three": {"a": 1, "b": 2}}


def test_one_pattern_is_a_list_of_one(write: Any) -> None:
    assert load_config(write(MODEL + "keep_fp32: head\n")).settings.keep_fp32 == ("head",)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("modle: {}\n", [":1:", "unknown key `modle`", "did you mean `model`?"]),
        (MODEL + "seeds: 1\n", [":2:", "`seeds`", "`seed`"]),
        (MODEL + "qqq: 1\n", [":2:", "`qqq`", "there are `model`", "`tolerances`"]),
        ("model: {factory: a:b, kwarg: {}}\n", [":1:", "unknown key `kwarg` in `model`", "`kwargs`"]),
        (MODEL + "batch: {pth: x}\n", [":2:", "`pth` in `batch`", "`path`"]),
        (MODEL + "checkpoint: {path: x, stric: 1}\n", ["`stric` in `checkpoint`", "`strict`"]),
        (MODEL + "loss: {factory: a:b, name: x}\n", ["`name` in `loss`"]),
        (MODEL + "mode: cast\nseed: 1\nmode: autocast\n", [":4:", "duplicate key `mode`", "line 2"]),
        ("model: {factory: a:b, factory: c:d}\n", [":1:", "duplicate key `factory`"]),
        (MODEL + "seed: one\n", [":2:", "`seed`", "expected an integer", "the text 'one'"]),
        (MODEL + "seed: true\n", [":2:", "`seed`", "got true"]),
        (MODEL + "seed: 1.5\n", ["`seed`", "the number 1.5"]),
        (MODEL + "seed: -1\n", ["`seed`", "the number -1"]),
        (MODEL + 'loss_scale: "1024"\n', [":2:", "`loss_scale`", "expected a finite number above 0", "'1024'"]),
        (MODEL + "loss_scale: 0\n", ["`loss_scale`"]),
        (MODEL + "loss_scale: .inf\n", ["`loss_scale`", "finite"]),
        (MODEL + "loss_scale: .nan\n", ["`loss_scale`", "finite"]),
        (MODEL + "mode: autcast\n", [":2:", "`mode`", "did you mean `autocast`?"]),
        (MODEL + "autocast_policy: gpu\n", ["`autocast_policy`", "cuda or cpu"]),
        (MODEL + "train: maybe\n", ["`train`", "true or false"]),
        (MODEL + "backward: 1\n", ["`backward`", "true or false", "the number 1"]),
        (MODEL + "keep_fp32: 3\n", ["`keep_fp32`", "a list of texts"]),
        (MODEL + "keep_fp32: [3]\n", ["`keep_fp32`", "the number 3"]),
        (MODEL + "device: gpu\n", ["`device`", "cuda:N"]),
        (MODEL + "batch: [a, b]\n", [":2:", "`batch`", "expected a path", "a list"]),
        (MODEL + "batch: 5\n", ["`batch`", "the number 5"]),
        (MODEL + "batch: {call: args}\n", ["`batch` needs the key `path`"]),
        (MODEL + "batch: {path: x, call: kwarg}\n", ["`batch.call`", "did you mean `kwargs`?"]),
        (MODEL + "batch: {path: x, dim: first}\n", ["`batch.dim`", "an integer"]),
        (MODEL + "loss: {kwargs: {}}\n", [":2:", "`loss` needs the key `factory`"]),
        (MODEL + "loss: toy.py:loss\n", ["`loss`", "expected a mapping"]),
        (MODEL + "optimizer: {kwargs: {lr: 1}}\n", ["`optimizer` needs the key `name`"]),
        (MODEL + "ignore: {module: x}\n", ["`ignore`", "expected a list"]),
        (MODEL + "ignore:\n  - {module: x}\n  - {why: x}\n", [":4:", "`ignore[1]`", "everything"]),
        (MODEL + "ignore: [{mechanism: overflw}]\n", ["`ignore[0].mechanism`", "did you mean `overflow`?"]),
        (MODEL + "tolerances: {bf61: 3}\n", [":2:", "`tolerances.bf61`", "did you mean `bf16`?"]),
        (MODEL + "tolerances: {bf16: lots}\n", ["`tolerances.bf16`", "'lots'"]),
        (MODEL + "tolerances: {head: {bf61: 3}}\n", ["`bf61` in `tolerances.head`", "`bf16`"]),
        (MODEL + "tolerances: 3\n", ["`tolerances`", "expected a mapping"]),
        ("seed: 1\n", ["there is no `model`"]),
        ("model: {}\n", [":1:", "`model` needs `factory"]),
        ("model: toy.py:build\n", ["`model`", "expected a mapping"]),
        ("model: {factory: a:b, transformers: {}}\n", ["both `factory` and `transformers`"]),
        ("model: {transformers: {path: x}}\n", ["`model.transformers` needs the key `class`"]),
        ("model: {transformers: {path: x, class: A}, kwargs: {a: 1}}\n", ["`model.kwargs`", "`model.transformers`"]),
        ("model: {factory: a:b, kwargs: [1]}\n", ["`model.kwargs`", "a mapping of names to values", "a list"]),
        ("- 1\n", ["expected a mapping", "a list"]),
        ("just text\n", ["expected a mapping"]),
        ("", ["the config file is empty"]),
        ("# only a comment\n", ["the config file is empty"]),
        ("model: {factory: a:b\nseed: 1\n", ["not valid YAML"]),
        ("model:\n\tfactory: a\n", [":2:", "not valid YAML"]),
        ("model: a\n---\nmodel: b\n", ["not valid YAML"]),
        ("1: a\n", [":1:", "a key must be text"]),
        ("? [a]\n: b\n", ["a key must be text"]),
        ("model: !!python/object:os.system {}\n", ["`model`"]),
        ("model: {factory: !!python/name:os.system x}\n", ["tag", "not supported"]),
        ("model: &m {factory: *m}\n", ["contains itself"]),
    ],
)
def test_a_mistake_is_one_line_with_file_line_and_key(write: Any, text: str, parts: list[str]) -> None:
    message = message_of(write(text))
    for part in parts:
        assert part in message


def test_unreadable_config_files(tmp_path: Path) -> None:
    assert "no such config file" in message_of(tmp_path / "none.yaml")
    assert "a folder" in message_of(tmp_path)
    binary = tmp_path / "bad.pt"
    binary.write_bytes(b"PK\x03\x04\xff\xfe\x00")
    assert "not a text file" in message_of(binary)
    control = tmp_path / "control.yaml"
    control.write_bytes(b"model: \x00\x01\n")
    assert "not valid YAML" in message_of(control)


def test_a_deeply_nested_document_is_refused(write: Any) -> None:
    assert "nested too deeply" in message_of(write("model: " + "[" * 5000 + "]" * 5000))


def test_discovery_prefers_yaml_to_yml(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no nanprobe\.yaml or nanprobe\.yml"):
        find_config(tmp_path)
    (tmp_path / "nanprobe.yml").write_text(MODEL)
    assert find_config(tmp_path).name == "nanprobe.yml"
    (tmp_path / "nanprobe.yaml").write_text(MODEL)
    assert find_config(tmp_path).name == "nanprobe.yaml"


def test_flags_beat_the_file(write: Any) -> None:
    config = load_config(write(MODEL + "mode: cast\nseed: 3\nbatch: {path: a.pt, dim: 1}\ntrain: true\n"))
    changed = apply_overrides(
        config, Overrides(mode="autocast", seed=4, batch="b.pt", checkpoint="w.pt", backward=False, loss_scale=2.0)
    )
    assert changed.settings.mode == "autocast"
    assert changed.settings.seed == 4
    assert changed.settings.backward is False
    assert changed.settings.loss_scale == 2.0
    assert changed.settings.train is True
    assert changed.batch == BatchSpec(path=Path("b.pt"), given="b.pt", dim=1)
    assert changed.checkpoint == CheckpointSpec(path=Path("w.pt"), given="w.pt")
    assert changed.origins["mode"] == "--mode"
    assert changed.origins["backward"] == "--no-backward"
    assert changed.origins["train"].endswith("nanprobe.yaml:5")
    assert apply_overrides(config, Overrides()) == config


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (Overrides(mode="cats"), ["--mode", "`cast`"]),
        (Overrides(loss_scale=-1.0), ["--loss-scale", "above 0"]),
        (Overrides(loss_scale=math.inf), ["--loss-scale", "finite"]),
        (Overrides(device="tpu"), ["--device", "cuda:N"]),
        (Overrides(autocast_policy="x"), ["--autocast-policy"]),
        (Overrides(seed=-1), ["--seed"]),
        (Overrides(batch=""), ["--batch"]),
    ],
)
def test_a_flag_that_makes_no_sense_is_named(write: Any, overrides: Overrides, parts: list[str]) -> None:
    config = load_config(write(MODEL))
    with pytest.raises(UsageError) as caught:
        apply_overrides(config, overrides)
    assert all(part in str(caught.value) for part in parts)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"mode": "fast"}, "mode"),
        ({"loss_scale": 0}, "loss_scale"),
        ({"seed": 1.5}, "seed"),
        ({"device": "tpu"}, "device"),
        ({"keep_fp32": 3}, "keep_fp32"),
        ({"backward": "perhaps"}, "backward"),
    ],
)
def test_settings_check_themselves(settings: dict[str, Any], field: str) -> None:
    with pytest.raises(UsageError, match=f"^{field}: expected"):
        Settings(**settings)


def test_settings_take_a_list_of_patterns() -> None:
    assert Settings(keep_fp32=["a", "b"]).keep_fp32 == ("a", "b")  # type: ignore[arg-type]  # what notebooks pass


def test_train_follows_from_the_loss() -> None:
    assert Settings().resolved_train(loss_given=True) is True
    assert Settings().resolved_train(loss_given=False) is False
    assert Settings(backward=True).resolved_train(loss_given=False) is True
    assert Settings(backward=False).resolved_train(loss_given=True) is True
    assert Settings(train=False).resolved_train(loss_given=True) is False


def test_show_config_says_where_each_value_came_from(write: Any) -> None:
    path = write(MODEL + "seed: 3\nmode: cast\n")
    text = show_config(apply_overrides(load_config(path), Overrides(mode="autocast")))
    assert f"seed: 3  # {path}:2" in text
    assert "mode: autocast  # --mode" in text
    assert "autocast_policy: cuda  # default" in text
    document = config_document(load_config(path))
    assert document["config"]["seed"] == 3
    assert document["origins"]["seed"] == f"{path}:2"


texts = st.text(st.characters(exclude_categories=("C",), exclude_characters="\x85\u2028\u2029"), min_size=1).filter(
    lambda text: text.strip()
)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=5)
positive = st.floats(min_value=1e-30, max_value=1e30)
settings = st.builds(
    Settings,
    mode=st.sampled_from(["autocast", "cast"]),
    train=st.booleans(),
    backward=st.none() | st.booleans(),
    loss_scale=st.none() | positive,
    keep_fp32=st.lists(texts).map(tuple),
    seed=st.integers(0, 2**64 - 1),
    ignore=st.lists(st.builds(IgnoreRule, module=texts, why=texts)).map(tuple),
    tolerances=st.lists(st.builds(Tolerance, module=texts, format=st.just("bf16"), multiple=positive), max_size=1).map(
        tuple
    ),
)


@given(kwargs=st.dictionaries(texts, values), chosen=settings, prefix=st.none() | texts)
def test_what_show_config_prints_is_the_same_config(
    tmp_path_factory: pytest.TempPathFactory, kwargs: dict[str, Any], chosen: Settings, prefix: str | None
) -> None:
    folder = tmp_path_factory.mktemp("shown")
    config = Config(
        source=folder / "nanprobe.yaml",
        folder=folder,
        model=ModelSpec(factory="toy.py:build", kwargs=kwargs),
        checkpoint=CheckpointSpec(path=folder / "m.pt", strip_prefix=prefix),
        settings=chosen,
    )
    path = folder / "shown.yaml"
    path.write_text(show_config(config), encoding="utf-8")
    again = load_config(path)
    assert again.model == config.model
    assert again.checkpoint == config.checkpoint
    assert again.settings == config.settings


DOCS = Path(__file__).resolve().parent.parent / "docs" / "configuration.md"


def documented(position: int) -> str:
    return DOCS.read_text("utf-8").split("```yaml\n")[position].split("```")[0]


def test_the_documented_example_has_every_key_and_loads(write: Any) -> None:
    config = load_config(write(documented(1)))
    assert set(config.origins) == set(config_document(config)["config"])
    assert config.settings.tolerances[2] == Tolerance(module="head.*", format="bf16", multiple=128)
    assert load_config(write(documented(2))).model.transformers is not None


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (
            "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
            + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join(['*' + chr(97 + i)] * 10)}]\n" for i in range(9)),
            "more than 100,000 values",
        ),
        (f"model: {{factory: a:b}}\nseed: {'9' * 5000}\n", "nanprobe.yaml:2: a number of 5,000 digits"),
        (f"model: {{factory: a:b}}\nseed: {'9' * 3000}\n", "got a number of about 3,000 digits"),
        (f"model: {{factory: a:b}}\nseed: 0x{'f' * 9000}\n", "a number of 9,002 digits"),
        ('model: {factory: a:b}\nbatch: "a\\0b.pt"\n', "`batch`: expected text without a NUL character"),
        ('model: {factory: "a\\0:b"}\n', "`model.factory`: expected text without a NUL character"),
        (
            "model: {factory: a:b}\nloss_scale: 1e-300\n",
            "expected a number from 1e-30 to 3.4e+38, got the number 1e-300",
        ),
        ("model: {factory: a:b}\nloss_scale: 1e39\n", "expected a number from 1e-30 to 3.4e+38"),
        ("model: {factory: a:b}\nignore: [{why: known}]\n", "{module: encoder.*, mechanism: overflow, why:"),
        ("#" * (5 * 2**20), "larger than 4 MiB"),
    ],
    ids=["aliases", "digits", "seed", "hex", "nul", "nul in factory", "small scale", "large scale", "ignore", "large"],
)
def test_what_no_config_holds(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "nanprobe.yaml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load_config(tmp_path / "nanprobe.yaml")
    assert part in str(caught.value)


def test_an_alias_within_reason_is_fine(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("model: {factory: a:b, kwargs: {x: &x [1, 2], y: *x, z: *x}}\n")
    assert load_config(tmp_path / "c.yaml").model.kwargs == {"x": [1, 2], "y": [1, 2], "z": [1, 2]}


def test_what_is_no_file_is_said_as_such(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    with pytest.raises(UsageError, match=r"pipe\.yaml: a pipe, where a config file is expected"):
        load_config(tmp_path / "pipe.yaml")
    with pytest.raises(UsageError, match="a device, where a config file is expected"):
        load_config(Path("/dev/zero"))
    with pytest.raises(UsageError, match="no file can have this name"):
        load_config(tmp_path / "a\0b")
    (tmp_path / "nanprobe.yml").symlink_to("nanprobe.yml")
    with pytest.raises(UsageError, match="symbolic links"):
        load_config(find_config(tmp_path))
    (tmp_path / "nanprobe.yaml").mkdir()
    with pytest.raises(UsageError, match=r"nanprobe\.yaml: a folder, where a config file is expected"):
        load_config(find_config(tmp_path))


def test_an_ignore_entry_that_says_little_is_told(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model: {factory: a:b}\nignore: [{module: head}, {mechanism: overflow, why: known}]\n")
    without_mechanism, without_why = load_config(path).notes
    assert "c.yaml:2: `ignore[0]` has no `mechanism`, so every finding there is ignored" in without_mechanism
    assert "`ignore[0]` has no `why`" in without_why
