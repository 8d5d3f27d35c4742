"""The plan: which layer becomes what, and why."""

from __future__ import annotations

import pytest
from leandit.quant.errors import NothingSelectedError, SettingsError
from leandit.quant.families import FAMILIES, family_of
from leandit.quant.plan import Layer, Plan, Quantize, make_plan
from leandit.quant.settings import settings_from


def layers(*specs: tuple[str, int], **extra: str) -> list[Layer]:
    return [Layer(name, 64, k, 128 * k, **extra) for name, k in specs]


def tower(inner: str, k: int = 256, blocks: int = 2, name: str = "blocks") -> list[Layer]:
    return layers(*((f"{name}.{index}.{inner}", k) for index in range(blocks)))


def decided(plan: Plan) -> dict[str, tuple[str | None, int | None]]:
    return {
        d.layer.name: (d.format.name, d.group_size) if isinstance(d, Quantize) else (None, None)
        for d in plan.decisions
    }


def reasons(plan: Plan) -> dict[str, str]:
    return {d.layer.name: d.reason for d in plan.decisions}


@pytest.mark.parametrize(
    ("k", "group"),
    [(256, 256), (5376, 256), (2688, 64), (96, 16), (32, 16), (64, 64), (13824, 256)],
)
def test_auto_takes_the_largest_group_that_divides(k: int, group: int) -> None:
    plan = make_plan(tower("q", k), settings_from(), None)
    assert decided(plan)["blocks.0.q"] == ("int8_convrot", group)


@pytest.mark.parametrize("k", [8, 20, 100])
def test_a_width_no_group_divides_is_kept_with_the_reason(k: int) -> None:
    plan = make_plan(tower("q", k) + tower("v", 256), settings_from(), None)
    assert decided(plan)["blocks.0.q"] == (None, None)
    assert reasons(plan)["blocks.0.q"] == f"no rotation group of 256, 64, 16 divides K={k}"


def test_a_fixed_group_keeps_the_layers_it_does_not_divide() -> None:
    plan = make_plan(tower("q", 96) + tower("v", 512), settings_from(group_size="64"), None)
    assert decided(plan)["blocks.0.q"] == (None, None)
    assert reasons(plan)["blocks.0.q"] == "group 64 does not divide K=96"
    assert decided(plan)["blocks.1.v"] == ("int8_convrot", 64)


def test_int8_without_rotation_takes_any_width() -> None:
    plan = make_plan(tower("q", 20), settings_from("int8"), None)
    assert decided(plan)["blocks.0.q"] == ("int8", None)


def test_w4a4_keeps_widths_that_are_no_multiple_of_64() -> None:
    plan = make_plan(tower("q", 96) + tower("v", 256), settings_from("w4a4_convrot"), None)
    assert reasons(plan)["blocks.0.q"] == "w4a4_convrot needs K divisible by 64, K=96"


def test_only_the_repeated_blocks_are_taken_and_every_other_layer_has_a_reason() -> None:
    model = [
        *tower("attn.qkv"),
        *tower("img_mod.lin"),
        *tower("norm1.linear"),
        *tower("adaLN_modulation.1"),
        *layers(("final_layer.linear", 256), ("time_embedding.0", 256), ("time_embedding.2", 256)),
        *tower("attn.qkv", name="txt_in.refiner_blocks"),
    ]
    plan = make_plan(model, settings_from(), None)
    assert [d.layer.name for d in plan.selected] == ["blocks.0.attn.qkv", "blocks.1.attn.qkv"]
    why = reasons(plan)
    assert "outside the repeated blocks" in why["final_layer.linear"]
    assert "outside the repeated blocks" in why["time_embedding.0"]
    assert "modulation or norm projection 'img_mod'" in why["blocks.0.img_mod.lin"]
    assert "'norm1'" in why["blocks.1.norm1.linear"]
    assert "helper network 'txt_in'" in why["txt_in.refiner_blocks.0.attn.qkv"]


def test_include_overrides_the_preset_and_exclude_overrides_include() -> None:
    model = [*tower("q"), *tower("img_mod.lin"), *layers(("final.linear", 256))]
    settings = settings_from(include="*mod*\nfinal*", exclude="re:blocks\\.1\\.")
    plan = make_plan(model, settings, None)
    assert [d.layer.name for d in plan.selected] == [
        "blocks.0.q",
        "blocks.0.img_mod.lin",
        "final.linear",
    ]
    assert reasons(plan)["blocks.1.q"] == "excluded by 're:blocks\\\\.1\\\\.'"
    assert reasons(plan)["final.linear"] == "included by 'final*'"


def test_a_pattern_that_matches_nothing_is_reported_by_name() -> None:
    plan = make_plan(tower("q"), settings_from(include="*attn*", exclude="nope.*"), None)
    assert any("include pattern '*attn*' matches no layer" in note for note in plan.notes)
    assert any("exclude pattern 'nope.*' matches no layer" in note for note in plan.notes)


@pytest.mark.parametrize("format", ["w4a8_convrot", "w4a4_convrot"])
def test_4_bits_keep_the_layers_comfyui_reads_the_models_size_from(format: str) -> None:
    model = [*layers(("img_in", 256)), *tower("attn2.to_k", name="transformer_blocks")]
    plan = make_plan(model, settings_from(format, preset="none"), None)
    assert [d.layer.name for d in plan.selected] == ["transformer_blocks.1.attn2.to_k"]
    assert "reads the model's size" in reasons(plan)["img_in"]
    eight = make_plan(model, settings_from(preset="none"), None)
    assert len(eight.selected) == 3


def test_preset_none_takes_every_layer() -> None:
    plan = make_plan(layers(("a", 256), ("final.b", 64)), settings_from(preset="none"), None)
    assert len(plan.selected) == 2


@pytest.mark.parametrize("preset", ["auto", "none"])
def test_packed_layers_are_kept_even_when_included(preset: str) -> None:
    packed = layers(("blocks.0.q", 256), packed="already quantized (nvfp4)")
    settings = settings_from(preset=preset, include="*")
    plan = make_plan([*packed, *tower("v")], settings, None)
    assert reasons(plan)["blocks.0.q"] == "already quantized (nvfp4)"
    assert decided(plan)["blocks.0.q"] == (None, None)


def test_a_model_that_is_quantized_already_gives_a_plan_without_selected_layers() -> None:
    specs = (("blocks.0.q", 256), ("blocks.1.q", 256))
    plan = make_plan(layers(*specs, packed="already quantized"), settings_from(), None)
    assert plan.selected == ()


def test_one_packed_layer_does_not_hide_that_nothing_is_selected() -> None:
    packed = layers(("blocks.0.v", 256), packed="already quantized (fp8)")
    with pytest.raises(NothingSelectedError, match=r"excluded by '\*'.*exclude patterns narrower"):
        make_plan([*packed, *tower("q")], settings_from(exclude="*"), None)


def test_a_preset_for_another_family_is_noted() -> None:
    plan = make_plan(tower("q"), settings_from(preset="wan"), family_of("flux"))
    assert "preset 'wan' is used, but the model is recognised as 'flux'" in plan.notes
    assert not make_plan(tower("q"), settings_from(preset="flux"), family_of("flux")).notes


def test_no_linear_layers_is_an_error() -> None:
    with pytest.raises(NothingSelectedError, match="no Linear layers"):
        make_plan([], settings_from(), None)


def test_no_selected_layer_is_an_error_that_lists_the_reasons() -> None:
    model = [*tower("q", 100), *layers(("final.linear", 256))]
    with pytest.raises(NothingSelectedError) as caught:
        make_plan(model, settings_from(exclude="zzz"), None)
    message = str(caught.value)
    assert "preset 'none' or an include pattern" in message
    assert "2 x no rotation group of 256, 64, 16 divides K=100 (such as 'blocks.0.q')" in message
    assert "1 x outside the repeated blocks" in message
    assert "exclude pattern 'zzz' matches no layer" in message


def test_a_family_rule_comes_before_the_general_rule() -> None:
    model = [*tower("img_mod.1", name="transformer_blocks"), *tower("attn.to_q")]
    plan = make_plan(model, settings_from(), family_of("qwen_image"))
    assert plan.family == "qwen_image"
    assert decided(plan)["transformer_blocks.0.img_mod.1"] == (None, None)
    assert decided(plan)["transformer_blocks.1.img_mod.1"] == ("int8_convrot", 256)


def test_a_preset_that_names_a_family_replaces_the_recognised_one() -> None:
    model = [*tower("adaln_proj.linear", 2688), *tower("attn.qkv_proj")]
    plan = make_plan(model, settings_from(preset="minimax_h3"), family_of("flux"))
    assert plan.family == "minimax_h3"
    assert decided(plan)["blocks.0.adaln_proj.linear"] == ("int8_convrot", 64)


@pytest.mark.parametrize(("blocks", "kept"), [(48, True), (28, False)])
def test_ltx_2_keeps_its_first_and_last_blocks_and_ltx_1_does_not(blocks: int, kept: bool) -> None:
    model = tower("attn1.to_q", blocks=blocks, name="transformer_blocks")
    plan = make_plan(model, settings_from(), family_of("ltxv"))
    assert (decided(plan)["transformer_blocks.1.attn1.to_q"] == (None, None)) == kept
    assert decided(plan)["transformer_blocks.5.attn1.to_q"] == ("int8_convrot", 256)


def test_every_family_has_a_reason_for_every_rule_and_its_own_name() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert family.rules
        for rule in family.rules:
            assert len(rule.reason) > 20


def test_an_unknown_image_model_has_no_family() -> None:
    assert family_of("something_new") is None
    assert family_of(None) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format": "int3"}, "unknown format 'int3'; valid formats: int8_convrot, int8,"),
        ({"group_size": "32"}, "unknown group_size '32'; valid sizes: auto, 256, 64, 16"),
        ({"preset": "fluxx"}, "unknown preset 'fluxx'; valid presets: auto, none, flux,"),
        ({"include": "re:("}, "include: 're:\\(' is not a valid regular expression"),
        ({"exclude": "ok\nre:"}, "exclude: 're:' has no expression"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_wrong_setting_is_an_error_with_the_valid_ones(
    change: dict[str, str], words: str
) -> None:
    with pytest.raises(SettingsError, match=words):
        settings_from(**change)
