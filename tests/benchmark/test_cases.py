"""The cases of the benchmark: chosen by name, laid over the settings, each mistake one message."""

from pathlib import Path

import pytest
import yaml

from workflow.benchmark.cases import (
    BenchmarkConfig,
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


def wanted(**changes):
    """Return the requests of settings that differ from the defaults so."""
    return requests(load_benchmark({"benchmark": changes}), num_gpus=0)


@pytest.mark.parametrize("model", ["google/gemma-2-27b", "google/gemma-3-12b-pt"])
def test_layers_and_vocabulary_of_a_case_are_those_of_its_decoder(model):
    config = model_config(BenchmarkConfig(model=model, layers=LAYERS, vocab_size=VOCABULARY))
    assert (config["num_hidden_layers"], config["vocab_size"]) == (LAYERS, VOCABULARY)
    # The shipped config of Gemma 3 is that of a model with a vision tower.
    assert "text_config" not in config


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.stem)
def test_every_case_of_shipped_settings_is_a_run_that_could_be(path):
    text = path.read_text()
    assert f"--configfile {path}" in text
    found = requests(load_benchmark(yaml.safe_load(text)), num_gpus=0)
    assert found
    for request in found:
        assert model_config(request.sizes)["max_position_embeddings"] >= request.sizes.seq_len
        hardware = request.settings.get("hardware", {})
        if hardware.get("shard_size") != 1:  # what `ddp` asks for
            run = run_settings(request, device="cpu")
            assert run.hardware.context_parallel == hardware.get("context_parallel", 1)


def test_settings_of_anything_else_are_refused():
    with pytest.raises(UserError, match=r"train = .*: the benchmark reads section `benchmark`"):
        load_benchmark({"benchmark": {}, "train": {"seed": 1}})


def test_unknown_case_is_one_message_with_the_nearest_names():
    with pytest.raises(UserError, match=r"benchmark.cases = 'flush': .* Did you mean flash"):
        wanted(cases=["flush"])


def test_unknown_setting_of_a_case_names_the_case(tmp_path):
    case = {"flash": {"settings": {"train": {"fussed": 1}}}}
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(case))
    (request,) = wanted(cases=["flash"], cases_file=str(tmp_path / "cases.yaml"))
    with pytest.raises(UserError, match=r"case flash: .*train.fussed"):
        run_settings(request, device="cpu")


def test_case_names_the_number_of_processes_that_share_rows(tmp_path):
    case = {"flash": {"settings": {"hardware": {"context_parallel": "auto"}}}}
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(case))
    (request,) = wanted(cases=["flash"], cases_file=str(tmp_path / "cases.yaml"))
    with pytest.raises(UserError, match=r"context_parallel = 'auto': .* Set it to a number"):
        run_settings(request, device="cpu")


def test_case_that_is_no_mapping_is_refused(tmp_path):
    (tmp_path / "cases.yaml").write_text("flash: 3\n")
    with pytest.raises(UserError, match=r"case flash .*\n  it must be a section"):
        wanted(cases=["flash"], cases_file=str(tmp_path / "cases.yaml"))


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no such file"), ("- flash\n", "no mapping by name"), ("a: b: c\n", "no YAML")],
)
def test_file_that_is_no_mapping_is_refused_by_its_name(tmp_path, text, message):
    file = tmp_path / "cases.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=rf"{file}.*{message}"):
        wanted(cases=["flash"], cases_file=str(file))


def test_every_shipped_case_but_ddp_has_settings_that_a_run_may_have():
    found = wanted(cases="all", peers=True, processes=[4])
    assert {request.name for request in found if request.peer} == {
        name for name in read_cases(None) if name.startswith(("trl_", "unsloth"))
    }
    for request in found:
        if request.name != "ddp":
            run_settings(request, device="cpu")


def test_peers_are_left_out_unless_asked_for():
    assert not any(request.peer for request in wanted(cases="all"))
    assert [request.name for request in wanted(cases=["trl_ddp"])] == ["trl_ddp"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"strategy": "fsdp2"}, "strategy = fsdp2, .* Set strategy: ddp"),
        ({"liger": True}, "liger = True: unsloth .* liger: false"),
    ],
)
def test_unsloth_takes_neither_shards_nor_other_kernels(tmp_path, changed, message):
    peer = {"software": "unsloth", "strategy": "ddp"} | changed
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump({"unsloth": {"peer": peer}}))
    with pytest.raises(UserError, match=message):
        wanted(cases=["unsloth"], cases_file=str(tmp_path / "cases.yaml"))
