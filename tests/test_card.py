"""The model card: metadata that the hub reads, and facts that are the run's."""

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from tests.finished import finished
from workflow.lib.artifacts import read_json
from workflow.lib.card import model_card

PARITY = {"max_abs_difference": 1.5e-6, "tolerance": 0.0018, "positions": 47}


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    loaded: dict[str, Any] = read_json(
        finished(tmp_path_factory.getbasetemp()) / "finetune" / "summary.json"
    )
    return loaded


def card(
    summary: dict[str, Any], *, source: str = "acme/tiny-1b", is_hub_model: bool = True
) -> str:
    return model_card(source=source, is_hub_model=is_hub_model, summary=summary, parity=PARITY)


def test_metadata_is_read_back_by_the_hubs_own_parser(
    summary: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "README.md").write_text(card(summary))
    data = ModelCard.load(tmp_path / "README.md").data.to_dict()
    assert data == {
        "base_model": "acme/tiny-1b",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["lora", "qlora", "fsdp"],
    }


def test_local_base_is_described_and_not_linked(summary: dict[str, Any]) -> None:
    text = card(summary, source="models/mine", is_hub_model=False)
    assert "base_model" not in ModelCard(text).data.to_dict()
    assert "| Base model | `models/mine`, NF4 with bitsandbytes |" in text


@pytest.mark.parametrize(
    "line",
    [
        "# demo",
        "| Adapter | LoRA, rank 3, alpha 7.5, targets all linear layers |",
        "| Optimizer steps | 7 of 4 rows of 23 tokens |",
        "| Peak learning rate | 0.02, cosine schedule, seed 0 |",
        "| Export check | logits of the reloaded adapter within 1.5e-06 of the trained model's (tolerance 0.0018) at 47 positions |",
        'base = AutoModelForCausalLM.from_pretrained("acme/tiny-1b")',
    ],
)
def test_card_states_the_runs_facts(summary: dict[str, Any], line: str) -> None:
    assert line in card(summary).splitlines()


def test_named_targets_are_listed(summary: dict[str, Any]) -> None:
    lora = summary["settings"]["lora"] | {"target_modules": ["q_proj", "v_proj"]}
    text = card(summary | {"settings": summary["settings"] | {"lora": lora}})
    assert "targets `q_proj`, `v_proj` |" in text
