"""config.json: forms of infinity, strict access, accounting of keys."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tiny_family import CONFIG, write_folder

from trtllm_replayssm.builders.hf.config import HARMLESS, HfConfig, read_config, text_section
from trtllm_replayssm.errors import CheckpointError, UnsupportedModelError


def read(tmp_path: Path, text: str) -> dict:
    (tmp_path / "config.json").write_text(text)
    return read_config(tmp_path / "config.json")


# ---- the file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["[0.0, Infinity]", '[0.0, {"__float__": "Infinity"}]', '[0.0, {"__float__": "inf"}]'])
def test_forms_of_infinity(tmp_path: Path, text: str) -> None:
    assert read(tmp_path, f'{{"time_step_limit": {text}}}') == {"time_step_limit": [0.0, math.inf]}


def test_minus_infinity(tmp_path: Path) -> None:
    assert read(tmp_path, '{"a": {"__float__": "-Infinity"}, "b": -Infinity}') == {"a": -math.inf, "b": -math.inf}


@pytest.mark.parametrize(
    "text",
    ["", "{", "{'a': 1}", '{"a": {"__float__": "much"}}', '{"a": {"__float__": null}}', '{"a":' * 50_000, "[]", "3"],
)
def test_damaged_config(tmp_path: Path, text: str) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json") as damaged:
        read(tmp_path, text)
    assert damaged.value.hint == "download it again"


def test_a_mark_of_utf_8_at_the_beginning_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'\xef\xbb\xbf{"hidden_size": 64}')
    assert read_config(tmp_path / "config.json") == {"hidden_size": 64}


def test_config_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read"):
        read_config(tmp_path / "config.json")


def test_config_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").mkdir()
    with pytest.raises(CheckpointError, match="Is a directory"):
        read_config(tmp_path / "config.json")


def test_text_section_of_wrappers() -> None:
    assert text_section({"text_config": {"a": 1}, "a": 2}) == {"a": 1}
    assert text_section({"llm_config": {"a": 1}}) == {"a": 1}
    assert text_section({"text_config": None, "a": 2}) == {"text_config": None, "a": 2}


# ---- access ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("integer", True),
        ("integer", 4.0),
        ("integer", "4"),
        ("positive", True),
        ("positive", 0),
        ("positive", -1),
        ("positive", 2**31),
        ("count", -1),
        ("count", 2**31),
        ("count", 0.0),
        ("number", True),
        ("number", "1e-5"),
        ("number", math.nan),
        ("number", math.inf),
        ("positive_number", 0),
        ("positive_number", -1e-5),
        ("positive_number", -math.inf),
        ("flag", 1),
        ("flag", "true"),
        ("text", 3),
        ("section", []),
        ("integer", None),
        ("section", None),
    ],
)
def test_wrong_values_name_their_key(method: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: key "):
        getattr(HfConfig({"key": value}), method)("key")


@pytest.mark.parametrize(
    "method", ["integer", "count", "positive", "number", "positive_number", "flag", "text", "section", "first"]
)
def test_nothing_is_assumed_for_a_missing_key(method: str) -> None:
    with pytest.raises(CheckpointError, match="key is missing"):
        getattr(HfConfig({}), method)("key")


@pytest.mark.parametrize(("key", "most"), [("num_hidden_layers", 2048), ("num_experts", 8192)])
def test_what_is_named_one_by_one_is_not_too_many(key: str, most: int) -> None:
    assert HfConfig({key: most}).positive(key) == most
    with pytest.raises(CheckpointError, match=f"{key} is {most + 1}; no model has more than {most}"):
        HfConfig({key: most + 1}).positive(key)


@pytest.mark.parametrize("digits", [30, 400, 5000])
def test_integers_of_many_digits_are_no_counts(tmp_path: Path, digits: int) -> None:
    config = HfConfig(read(tmp_path, f'{{"vocab_size": 1{"0" * digits}, "eos_token_id": {2**62}}}'))
    with pytest.raises(CheckpointError, match=r"vocab_size is (inf|1e\+30); expected int"):
        config.positive("vocab_size")
    assert config.integer("eos_token_id") == 2**62


def test_an_integer_is_a_number() -> None:
    value = HfConfig({"rope_theta": 10_000_000}).number("rope_theta")
    assert (value, type(value)) == (1e7, float)


def test_defaults_stand_for_null_too() -> None:
    config = HfConfig({"a": None})
    assert config.integer("a", 3) == 3
    assert config.flag("b", False) is False


def test_first_of_several_spellings() -> None:
    config = HfConfig({"norm_eps": 1e-5, "layer_norm_epsilon": None})
    assert config.first("layer_norm_epsilon", "norm_eps") == "norm_eps"
    config.finish()


@pytest.mark.parametrize(
    ("value", "allowed"),
    [("silu", ("relu2",)), (True, (1,)), (1, (True,)), (False, (0,)), (0.5, (1.0,)), ([1], (1,)), ({}, ("a",))],
)
def test_unexpected_values_are_refused(value: object, allowed: tuple) -> None:
    with pytest.raises(UnsupportedModelError, match=r"key is .* not implemented"):
        HfConfig({"key": value}).expect("key", *allowed)


@pytest.mark.parametrize(("value", "allowed"), [("relu2", ("relu2",)), (1, (1.0,)), (None, (3,)), (False, (False,))])
def test_expected_values(value: object, allowed: tuple) -> None:
    config = HfConfig({"key": value})
    config.expect("key", *allowed)
    config.finish()


# ---- accounting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [True, 1, 0.5, "yes", [1], {"a": 0}, -1, math.inf])
def test_unknown_keys_that_are_on_are_refused(value: object) -> None:
    config = HfConfig({"known": 1, "use_new_trick": value})
    config.integer("known")
    with pytest.raises(UnsupportedModelError, match="use_new_trick"):
        config.finish()


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "", [], {}])
def test_unknown_keys_that_are_off_are_accepted(value: object) -> None:
    HfConfig({"use_new_trick": value}).finish()


def test_harmless_and_ignored_keys_are_accepted() -> None:
    config = HfConfig(dict.fromkeys(HARMLESS, "x") | {"vision_config": {"depth": 3}})
    config.ignore("vision_config")
    config.finish()


def test_sections_have_their_own_accounting() -> None:
    config = HfConfig({"rope_parameters": {"rope_theta": 1e7, "new": 1}})
    section = config.section("rope_parameters")
    section.number("rope_theta")
    config.finish()
    with pytest.raises(UnsupportedModelError, match=r"rope_parameters holds keys .*new = 1"):
        section.finish()


def test_every_unknown_key_is_listed() -> None:
    with pytest.raises(UnsupportedModelError, match="one = 1, two = 2"):
        HfConfig({"two": 2, "one": 1}).finish()


def test_the_config_of_a_written_folder_is_read_as_it_is(tmp_path: Path) -> None:
    write_folder(tmp_path, {}, CONFIG)
    assert read_config(tmp_path / "config.json") == json.loads(json.dumps(CONFIG))
