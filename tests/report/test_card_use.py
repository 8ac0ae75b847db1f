"""What the card says of serving an adapter by vLLM and SGLang."""

from dataclasses import replace
from typing import Any

import pytest

from tests.report.test_model_card import read
from tests.support.report_examples import add_subject, edit, write_run
from workflow.lib.report.card_inputs import code
from workflow.lib.report.card_use import serving_section, use_section

PLAIN: dict[str, Any] = {"r": 24, "lora_alpha": 32.0, "bias": "none", "use_dora": False}


def test_pattern_that_changes_nothing_is_no_obstacle(tmp_path):
    inputs = read(
        write_run(tmp_path, "demo", num_steps=3), adapter_config=PLAIN | {"rank_pattern": {}}
    )
    assert "vllm serve" in serving_section(inputs)


def test_commands_name_base_adapter_and_a_rank_that_vllm_has(tmp_path):
    inputs = read(write_run(tmp_path, "demo", num_steps=3), adapter_config=PLAIN)
    text = serving_section(inputs)
    assert (
        "vllm serve acme/tiny-1b --enable-lora --max-lora-rank 32 "
        "--lora-modules demo=path/to/this/folder\n"
    ) in text
    assert "--model-path acme/tiny-1b --enable-lora --lora-paths demo=path/to/this/folder" in text
    assert "was not evaluated" in text
    assert "Neither was run here" in text


def test_adapter_with_a_recovery_has_another_for_the_original(tmp_path):
    folder = write_run(tmp_path, "demo", num_steps=3)
    inputs = replace(read(folder, adapter_config=PLAIN), on_original=PLAIN | {"r": 48})
    served, used = serving_section(inputs), use_section(inputs)
    assert "--max-lora-rank 64 --lora-modules demo=path/to/this/folder/on_original\n" in served
    assert "belongs on the NF4 base alone" in used
    assert "the folder `on_original`, which holds the rest, at rank 48" in used
    assert "PeftModel.from_pretrained(base, adapter)\n" in used
    edit(folder / "evaluate_run" / "tuned.json", lambda d: d.update(served=False))
    add_subject(folder, "tuned_on_original", loss=1.5, served=True)
    inputs = replace(read(folder, adapter_config=PLAIN), on_original=PLAIN | {"r": 48})
    assert 'PeftModel.from_pretrained(base, adapter, subfolder="on_original")' in use_section(
        inputs
    )


@pytest.mark.parametrize(
    "more",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 8}},
        {"alpha_pattern": {"q_proj": 8}},
        {"target_parameters": ["mlp.experts.down_proj"]},
    ],
)
def test_adapter_that_is_not_served_is_to_be_merged(tmp_path, more):
    text = serving_section(
        read(write_run(tmp_path, "demo", num_steps=3), adapter_config=PLAIN | more)
    )
    assert "vllm serve" not in text
    assert f"({code(*more)})" in text
    assert "export.merged: true" in text


def test_merged_model_is_served_as_it_is(tmp_path):
    folder = write_run(tmp_path, "demo", num_steps=3)
    edit(folder / "evaluate_run" / "tuned.json", lambda d: d.update(served=False))
    add_subject(folder, "merged", loss=1.5, served=True)
    text = serving_section(read(folder, adapter_config=PLAIN | {"use_dora": True}))
    assert "vllm serve path/to/merged\n" in text
