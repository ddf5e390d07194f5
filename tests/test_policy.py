"""Policy and levels: frozen values, checked together at construction, errors that say what to
change.
"""

import copy
import dataclasses
import json
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

import tritonamp
from tritonamp.policy import LEVELS, Policy, resolve

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32

# the table of levels, row by row: O0, O1, O2, O3
TABLE: dict[str, tuple[Any, Any, Any, Any]] = {
    "dtype": (FP16, FP16, FP16, FP16),
    "cast_model": (False, False, True, True),
    "keep_norms_fp32": (False, False, True, False),
    "op_policy": (False, True, True, False),
    "master_weights": (False, False, True, False),
    "loss_scale": (1.0, "dynamic", "dynamic", 1.0),
    "init_scale": (2.0**16, 2.0**16, 2.0**16, 2.0**16),
    "cast_inputs": (False, False, False, True),
    "cast_outputs": (None, FP32, FP32, FP32),
    "softmax_dtype": (None, None, None, None),
    "grad_dtype": (None, None, None, None),
    "state_dict_dtype": (FP32, FP32, FP32, FP32),
    "fp32_modules": ((), (), (), ()),
    "fp32_results": ((), (), (), ()),
    "fuse_norms": (True, True, True, True),
    "fuse_ops": (True, True, True, True),
    "fuse_loss": (False, False, False, False),
    "batch_invariant": (False, False, False, False),
    "state": ("fp32", "fp32", "fp32", "fp32"),
    "masters": (None, None, None, None),
    "offload": (None, None, None, None),
    "half_parameters": (False, False, False, False),
    "on_nonfinite": ("skip", "skip", "skip", "skip"),
    "raise_after": (1, 1, 1, 1),
    "skip_outliers": (None, None, None, None),
    "track_changes": (False, False, False, False),
    "track_lost_updates": (False, False, False, False),
}


def test_the_table_names_every_field() -> None:
    assert set(TABLE) == {field.name for field in dataclasses.fields(Policy)}


@pytest.mark.parametrize("column", range(4))
@pytest.mark.parametrize("field", TABLE)
def test_levels(field: str, column: int) -> None:
    level = f"O{column}"
    assert getattr(resolve(level), field) == TABLE[field][column]
    assert resolve(level) is LEVELS[level] is getattr(tritonamp, level)


@pytest.mark.parametrize("level", LEVELS)
def test_a_policy_is_a_value(level: str) -> None:
    policy = LEVELS[level]
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.loss_scale = 2.0  # type: ignore[misc]
    for same in (
        copy.deepcopy(policy),
        pickle.loads(pickle.dumps(policy)),
        dataclasses.replace(policy),
    ):
        assert same == policy
        assert hash(same) == hash(policy)
    variant = dataclasses.replace(policy, loss_scale=128)
    assert variant != policy
    assert variant.loss_scale == 128.0
    assert LEVELS[level] is policy


def test_replace_checks_too() -> None:
    with pytest.raises(ValueError, match="master_weights=True needs cast_model=True"):
        dataclasses.replace(tritonamp.O2, cast_model=False)


@pytest.mark.parametrize("level", LEVELS)
def test_bf16_has_the_range_of_fp32_and_is_not_scaled_unless_asked(level: str) -> None:
    policy = resolve(level, BF16)
    assert policy == dataclasses.replace(LEVELS[level], dtype=BF16, loss_scale=1.0)
    assert not policy.scales_loss
    assert resolve(level, BF16, loss_scale="dynamic").loss_scale == "dynamic"
    assert resolve(level, BF16, loss_scale=8).loss_scale == 8.0
    assert resolve(level, FP16) == LEVELS[level]


@pytest.mark.parametrize(("name", "level"), [("O4", "O1"), ("O5", "O2")])
def test_the_bf16_levels_of_the_rocm_fork(name: str, level: str) -> None:
    assert resolve(name) == resolve(name, BF16) == resolve(level, BF16)
    with pytest.raises(
        ValueError,
        match=f"level='{name}': expected torch.bfloat16, got dtype=torch.float16: drop dtype",
    ):
        resolve(name, FP16)


def test_a_policy_as_level_keeps_its_own_loss_scale() -> None:
    assert resolve(tritonamp.O2) is tritonamp.O2
    assert resolve(tritonamp.O2, BF16).loss_scale == "dynamic"
    assert resolve(dataclasses.replace(tritonamp.O2, dtype=BF16)).dtype is BF16


def test_half_state_dicts_follow_the_dtype() -> None:
    half = resolve("O2", state_dict_dtype=FP16)
    assert resolve(half, BF16).state_dict_dtype is BF16
    assert resolve("O2", BF16, state_dict_dtype=BF16).state_dict_dtype is BF16


@pytest.mark.parametrize(
    ("level", "scaled"),
    [("O0", False), ("O1", True), ("O2", True), ("O3", False), ("O4", False), ("O5", False)],
)
def test_scales_loss(level: str, scaled: bool) -> None:
    assert resolve(level).scales_loss is scaled
    assert resolve(level, loss_scale=2).scales_loss is True


@pytest.mark.parametrize(
    "given",
    ["head", nn.LayerNorm, ["head", nn.LayerNorm], None, {"head"}],
    ids=["name", "class", "list", "generator", "set"],
)
@pytest.mark.parametrize("field", ["fp32_modules", "fp32_results"])
def test_a_selection_of_modules_becomes_a_tuple(field: str, given: Any) -> None:
    given = (name for name in ("head",)) if given is None else given
    modules = getattr(resolve("O1", **{field: given}), field)
    assert isinstance(modules, tuple)
    assert set(modules) <= {"head", nn.LayerNorm}
    assert modules


@pytest.mark.parametrize(
    ("given", "means"), [(True, True), (FP16, True), (False, False), (None, False)]
)
def test_cast_inputs_may_be_written_like_cast_outputs(given: Any, means: bool) -> None:
    assert resolve("O1", cast_inputs=given).cast_inputs is means


@pytest.mark.parametrize(
    ("given", "kept"),
    [("x", ("x",)), (["x", 1], ("x", 1)), ((0,), (0,)), ({"x"}, ("x",)), ([], False)],
    ids=repr,
)
def test_cast_inputs_may_name_arguments(given: Any, kept: Any) -> None:
    policy = resolve("O2", cast_inputs=given)
    assert policy.cast_inputs == kept
    assert hash(policy) == hash(dataclasses.replace(policy))
    assert Policy.from_json(policy.to_json()) == policy
    assert resolve(policy, BF16).cast_inputs == kept


def test_where_a_dynamic_loss_scale_begins() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = tritonamp.enable(model, optimizer, level="O2", init_scale=64)
    assert amp.scaler.get_scale() == 64.0
    x = torch.randn(2, 2)
    amp.backward(model(x).sum())
    amp.backward(model(x).sum(), loss_id=1)
    optimizer.step()
    assert amp.scaler.get_scale() == amp._scalers[1].get_scale() == 64.0
    amp.disable()
    with pytest.raises(ValueError, match=r"got both a scaler and init_scale=64: drop one"):
        tritonamp.enable(model, scaler=tritonamp.GradScaler("cpu"), init_scale=64)


@pytest.mark.parametrize("level", ["02", "o2", "O2 ", 2, None, "O6", "", "00", "o5"])
def test_unknown_level(level: Any) -> None:
    with pytest.raises(
        ValueError,
        match=r"level: expected 'O0', 'O1', 'O2', 'O3', 'O4', 'O5' or a tritonamp.Policy",
    ) as e:
        resolve(level)
    assert f"got {level!r}" in str(e.value)


@pytest.mark.parametrize(
    ("level", "meant"), [("02", "O2"), ("o2", "O2"), ("00", "O0"), ("o0", "O0"), ("o5", "O5")]
)
def test_the_letter_o(level: str, meant: str) -> None:
    with pytest.raises(
        ValueError, match=f"it begins with the capital letter O, not the digit zero: '{meant}'"
    ):
        resolve(level)


def test_unknown_fields_are_all_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"fields of Policy, got the unknown keep_batchnorm, opt_level.*fields are .*cast_",
    ):
        resolve("O2", opt_level="O2", keep_batchnorm=True)


SCALES = "loss_scale: expected 'dynamic' or a positive finite number"
BAD_VALUES: list[tuple[dict[str, Any], str]] = [
    (
        {"dtype": FP32},
        "dtype: expected torch.float16 or torch.bfloat16, got torch.float32 (for FP32 training",
    ),
    ({"dtype": "float16"}, "dtype: expected torch.float16 or torch.bfloat16, got 'float16'"),
    *[({"loss_scale": s}, f"{SCALES}, got {s!r}") for s in (0.0, -1.0, float("inf"), float("nan"))],
    *[({"loss_scale": s}, f"{SCALES}, got {s!r}") for s in ("static", True, None, [1.0])],
    *[
        ({name: 1}, f"{name}: expected True or False, got 1")
        for name in ("cast_model", "keep_norms_fp32", "op_policy", "master_weights", "cast_inputs")
    ],
    ({"cast_inputs": BF16}, "cast_inputs: expected True or False, got torch.bfloat16"),
    *[
        (
            {"cast_inputs": given},
            f"cast_inputs: expected True or False, got {tuple(given)!r}; or a list of arguments of "
            "the model's forward that are cast, by name or position",
        )
        for given in (["x", True], ["x", 1.5], [None])
    ],
    ({"cast_inputs": ["x", -1]}, "cast_inputs: expected positions from 0, got -1"),
    *[
        ({"init_scale": s}, f"init_scale: expected a positive finite number, got {s!r}")
        for s in (0.0, -1.0, float("inf"), float("nan"), "dynamic", None, True)
    ],
    (
        {"cast_outputs": torch.float64},
        "cast_outputs: expected torch.float32, a half dtype or None, got torch.float64",
    ),
    (
        {"cast_outputs": False},
        "cast_outputs: expected torch.float32, a half dtype or None, got False",
    ),
    (
        {"softmax_dtype": FP16},
        "softmax_dtype: expected None (keep the input's dtype) or torch.float32, got torch.float16",
    ),
    (
        {"state_dict_dtype": BF16},
        "state_dict_dtype: expected torch.float32 or the policy's torch.float16, got torch.bfl",
    ),
    (
        {"state_dict_dtype": None},
        "state_dict_dtype: expected torch.float32 or the policy's torch.float16, got None",
    ),
    (
        {"on_nonfinite": "ignore"},
        "on_nonfinite: expected one of 'skip', 'explain', 'heal', 'raise', got 'ignore'",
    ),
    ({"fp32_modules": None}, "fp32_modules: expected module names and module classes, got None"),
    ({"fp32_results": 3}, "fp32_results: expected module names and module classes, got 3"),
    ({"fp32_modules": 3}, "fp32_modules: expected module names and module classes, got 3"),
    (
        {"fp32_modules": ("head", 3)},
        "fp32_modules: expected module names and module classes, got ('head', 3)",
    ),
]


@pytest.mark.parametrize(("fields", "text"), BAD_VALUES, ids=repr)
def test_bad_values(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        resolve("O2", **fields)


def test_a_module_instance_in_fp32_modules() -> None:
    with pytest.raises(
        ValueError, match=r"fp32_modules: expected module names and module classes, got .*LayerNorm"
    ):
        resolve("O2", fp32_modules=[nn.LayerNorm(2)])
    with pytest.raises(ValueError, match="expected module names and module classes"):
        resolve("O2", fp32_modules=nn.Sequential(nn.LayerNorm(2)))


CONFLICTS: list[tuple[str, dict[str, Any], str]] = [
    (
        "O0",
        {"master_weights": True},
        r"master_weights=True needs cast_model=True: .*\(drop master_weights, or use",
    ),
    ("O1", {"master_weights": True}, "the parameters are the masters .*use level='O2'"),
    ("O2", {"cast_model": False}, "master_weights=True needs cast_model=True"),
    (
        "O1",
        {"keep_norms_fp32": True},
        "keep_norms_fp32=True needs cast_model=True: .*every parameter is FP32 already",
    ),
    (
        "O0",
        {"cast_inputs": True},
        "cast_inputs=True needs cast_model=True or op_policy=True: FP32 layers refuse half",
    ),
    (
        "O3",
        {"cast_inputs": False},
        "cast_model=True with op_policy=False needs cast_inputs=True: half layers refuse",
    ),
    ("O0", {"softmax_dtype": FP32}, "softmax_dtype needs op_policy=True"),
    ("O3", {"softmax_dtype": FP32}, "softmax_dtype needs op_policy=True"),
    ("O3", {"batch_invariant": True}, "batch_invariant=True needs op_policy=True"),
    ("O0", {"fp32_results": "head"}, "fp32_results needs op_policy=True"),
    ("O3", {"fp32_results": "head"}, "fp32_results needs op_policy=True: .*use level='O1' or 'O2'"),
    ("O0", {"track_changes": True}, r"track_changes=True needs half weights, .*\(use level='O2'"),
    ("O1", {"track_lost_updates": True}, "track_lost_updates=True needs half weights, cast_model"),
    (
        "O0",
        {"fp32_modules": "head"},
        "fp32_modules needs cast_model=True or op_policy=True: .*FP32 already",
    ),
]


@pytest.mark.parametrize(("level", "fields", "text"), CONFLICTS, ids=repr)
def test_conflicts(level: str, fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        resolve(level, **fields)


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(
        ValueError,
        match=r"loss_scale: .*'static'; on_nonfinite: .* 0; softmax_dtype needs op_policy",
    ):
        Policy(loss_scale="static", on_nonfinite=0, softmax_dtype=FP32)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "fields",
    [
        {"level": "O2"},
        {"level": tritonamp.O2},
        {"policy": tritonamp.O2},
        {"policy": "O2"},
        {
            "level": "O1",
            **{
                name: TABLE[name][2] for name in ("cast_model", "keep_norms_fp32", "master_weights")
            },
        },
    ],
    ids=repr,
)
def test_enable_takes_levels_policies_and_fields(fields: dict[str, Any]) -> None:
    amp = tritonamp.enable(nn.Linear(2, 2), **fields)
    assert amp.policy == tritonamp.O2
    amp.disable()


def test_enable_refuses_before_it_touches_the_model() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"loss_scale: expected .*, got -1"):
        tritonamp.enable(model, level="O2", loss_scale=-1)
    assert type(model) is nn.Linear
    assert model.weight.dtype is FP32


# as text


class Inner:
    """A class inside a class, and one that only this file has."""

    class Block(nn.Module):
        pass


@pytest.mark.parametrize(
    "policy",
    [
        *LEVELS.values(),
        resolve("O5", fp32_modules=["head", nn.LayerNorm, Inner.Block]),
        resolve("O2", fp32_results=["head", nn.Linear, Inner.Block]),
        resolve(
            "O2", softmax_dtype=FP32, state_dict_dtype=FP16, cast_outputs=FP16, loss_scale=128.0
        ),
    ],
)
def test_a_policy_survives_as_text(policy: Policy) -> None:
    assert Policy.from_json(policy.to_json()) == policy


def test_the_text_is_plain() -> None:
    plain = json.loads(resolve("O2", fp32_modules=["head", nn.LayerNorm]).to_json())
    assert plain["dtype"] == "float16"
    assert plain["cast_outputs"] == "float32"
    assert plain["softmax_dtype"] is None
    assert plain["fp32_modules"] == ["head", "torch.nn.modules.normalization:LayerNorm"]
    assert set(plain) == set(TABLE)


def test_fields_that_the_text_leaves_out_have_their_defaults() -> None:
    assert Policy.from_json("{}") == Policy()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"level": "O2"}', "got the unknown level. The fields are .*cast_model"),
        ("[]", "expected an object with keys of .*, got list"),
        ("no JSON", "Expecting value"),
        ('{"dtype": "float8"}', "dtype: expected torch.float16 .*got 'float8'"),
        ('{"master_weights": true}', "master_weights=True needs cast_model=True"),
        (
            '{"op_policy": true, "fp32_modules": ["torch.nn:Nothing"]}',
            "no class 'Nothing' can be imported from",
        ),
        (
            '{"op_policy": true, "fp32_modules": ["no_such_module:Net"]}',
            "no class 'Net' can be imported from",
        ),
        (
            '{"op_policy": true, "fp32_modules": ["math:pi"]}',
            "expected the class of a module, got 'math:pi' of type float",
        ),
        (
            '{"op_policy": true, "fp32_results": ["torch.nn:Nothing"]}',
            "fp32_results: no class 'Nothing' can be imported from",
        ),
        ('{"fp32_modules": null}', r"fp32_modules: expected module names .* got \[None\]"),
    ],
)
def test_texts_that_are_no_policy(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy.from_json(text)


@pytest.mark.parametrize(
    ("level", "fields", "expected"),
    [
        ("O0", {}, 16),
        ("O1", {"state": "bf16"}, 12),
        ("O1", {"state": "8bit"}, 4 + 4 + 2 + 2 / 128),
        ("O2", {}, 2 + 2 + 4 + 8),
        ("O2", {"state": "bf16"}, 2 + 2 + 4 + 4),
        ("O2", {"state": "8bit"}, 2 + 2 + 2 + 2 + 2 / 128),
        ("O2", {"masters": "packed"}, 2 + 2 + 2 + 8),
        ("O2", {"masters": "packed", "state": "bf16"}, 2 + 2 + 2 + 4),
        ("O2", {"masters": "fp32", "state": "bf16"}, 2 + 2 + 4 + 4),
        ("O2", {"grad_dtype": FP32}, 18),
        ("O1", {"offload": "state"}, 4 + 4),
        ("O2", {"offload": "state", "state": "8bit"}, 2 + 2),
        ("O3", {}, 2 + 2 + 8),
    ],
)
def test_bytes_per_parameter(level: str, fields: dict[str, Any], expected: float) -> None:
    policy = resolve(level, **fields)
    assert policy.bytes_per_parameter() == expected
    assert resolve(level).bytes_per_parameter("fp32") == resolve(level).bytes_per_parameter()
    with pytest.raises(ValueError, match="state: expected one of 'fp32', 'bf16', '8bit', got 'FP'"):
        policy.bytes_per_parameter("FP")


def test_formats_of_state() -> None:
    with pytest.raises(ValueError, match="state: expected one of 'fp32', 'bf16', '8bit', got '4"):
        resolve("O2", state="4bit")
    with pytest.raises(ValueError, match="state='8bit' needs FP32 values, master_weights=True"):
        resolve("O3", state="8bit")
