"""The cases of the benchmark: chosen by name, laid over the settings, each mistake one message."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from workflow.lib.benchmark.cases import (
    BenchmarkConfig,
    Request,
    load_benchmark,
    model_config,
    read_cases,
    requests,
    run_settings,
)
from workflow.lib.system.errors import UserError

LAYERS, VOCABULARY = 3, 1009
SETTINGS = sorted(
    path
    for path in Path("workflow/resources/benchmark").glob("*.yaml")
    if not path.stem.endswith("cases")
)


def wanted(**changes: Any) -> list[Request]:
    """Return the requests of settings that differ from the defaults so."""
    return requests(load_benchmark({"benchmark": changes}), num_gpus=0)


@pytest.mark.parametrize("model", ["google/gemma-2-27b", "google/gemma-3-12b-pt"])
def test_layers_and_vocabulary_of_a_case_are_those_of_its_decoder(model):
    config = model_config(BenchmarkConfig(model=model, layers=LAYERS, vocab_size=VOCABULARY))
    assert (config["num_hidden_layers"], config["vocab_size"]) == (LAYERS, VOCABULARY)
    # The shipped config of Gemma 3 is that of a model with a vision tower.
    assert "text_config" not in config


@pytest.mark.parametrize(
    ("model", "key", "first"),
    [
        ("google/gemma-4-31B", "layer_types", ["sliding_attention"] * LAYERS),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16", "hybrid_override_pattern", "MEM"),
    ],
)
def test_kinds_of_a_case_are_those_of_its_first_layers(model, key, first):
    assert model_config(BenchmarkConfig(model=model, layers=LAYERS))[key] == first
    assert len(model_config(BenchmarkConfig(model=model))[key]) > LAYERS


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.stem)
def test_every_case_of_shipped_settings_is_a_run_that_could_be(path):
    text = path.read_text()
    assert f"--configfile {path}" in text
    found = requests(load_benchmark(yaml.safe_load(text)), num_gpus=0)
    assert found
    for request in found:
        assert model_config(request.sizes)["max_position_embeddings"] >= request.sizes.seq_len
        if request.settings.get("hardware", {}).get("shard_size") != 1:  # what `ddp` asks for
            run_settings(request, device="cpu")


def test_settings_of_anything_else_are_refused():
    with pytest.raises(UserError, match=r"train = .*: the benchmark reads section `benchmark`"):
        load_benchmark({"benchmark": {}, "train": {"seed": 1}})


def test_unknown_case_is_one_message_with_the_nearest_names():
    with pytest.raises(UserError, match=r"benchmark.cases = 'flush': .* Did you mean flash"):
        wanted(cases=["flush"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"documents": 9, "seq_len": 32}, (
            "documents = 9: a row of seq_len = 32 tokens holds at most 8"
        )),
        ({"processes": []}, "must be numbers of 1 to 4096"),
        ({"cases": []}, "there is nothing to measure"),
        ({"memory_cap_gib": 0}, "benchmark.memory_cap_gib = 0: must be above 0"),
    ],
)  # fmt: skip
def test_bad_size_is_one_message(changes, message):
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        wanted(**changes)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"title": 3}, "title = 3: must be text"),
        ({"title": "x", "benchmark": {"processes": [2]}}, (
            "benchmark.processes is not a case's own"
        )),
        ({"title": "x", "peer": {"strategy": "fsdp3"}}, "strategy"),
        ({"title": "x", "setting": {}}, "setting"),
    ],
)  # fmt: skip
def test_wrong_entry_of_a_list_of_cases_is_named(tmp_path, entry, message):
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump({"mine": entry}))
    with pytest.raises(UserError, match=f"case mine of .*\\s*.*{message}"):
        read_cases(str(tmp_path / "cases.yaml"))


def test_unknown_setting_of_a_case_names_the_case(tmp_path):
    case = {"flash": {"settings": {"train": {"fussed": 1}}}}
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(case))
    (request,) = wanted(cases=["flash"], cases_file=str(tmp_path / "cases.yaml"))
    with pytest.raises(UserError, match=r"case flash: .*train.fussed"):
        run_settings(request, device="cpu")


def test_every_shipped_case_but_ddp_has_settings_that_a_run_may_have():
    found = wanted(cases="all", peers=True, processes=[4])
    assert {request.name for request in found if request.peer} == {
        name for name in read_cases(None) if name.startswith("trl_")
    }
    for request in found:
        if request.name != "ddp":
            run_settings(request, device="cpu")


def test_peers_are_left_out_unless_asked_for():
    assert not any(request.peer for request in wanted(cases="all"))
    assert [request.name for request in wanted(cases=["trl_ddp"])] == ["trl_ddp"]


def test_every_case_is_measured_with_every_number_of_processes():
    labels = [request.label for request in wanted(cases=["flash", "sdpa"], processes=[2, 4])]
    assert labels == ["flash-x2", "flash-x4", "sdpa-x2", "sdpa-x4"]
