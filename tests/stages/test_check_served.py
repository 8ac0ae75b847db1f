"""The stage that serves what is exported: what it needs is said before anything runs."""

import pytest

from workflow.lib.artifacts import local_inputs
from workflow.lib.artifacts.layout import stage_settings
from workflow.lib.artifacts.local_inputs import check_local_paths
from workflow.lib.settings.config import load_config
from workflow.lib.system.errors import UserError

REWARDS = {"functions": {"short": {"function": "length"}}}


def runs(**document):
    return load_config(document)[1]


@pytest.mark.parametrize(
    ("evaluate", "named"),
    [({"served": "tuned"}, "served = tuned"), ({"heldout": False}, "heldout")],
)
def test_what_a_server_does_not_have_is_refused_with_the_settings(evaluate, named):
    with pytest.raises(UserError, match=rf"export\.serve = vllm and evaluate\.{named}.* Set eval"):
        runs(export={"serve": "vllm"}, evaluate=evaluate)


@pytest.mark.parametrize(
    ("export", "served"),
    [
        ({}, "tuned"),
        ({"serve": "vllm"}, "tuned_on_original"),
        ({"serve": "vllm", "merged": True}, "merged"),
    ],
)
def test_verdict_is_about_the_form_that_a_server_has(export, served):
    (run,) = runs(export=export).values()
    assert run.served == served
    assert served in run.subjects


@pytest.mark.parametrize("export", [{}, {"gguf": ["q8_0"], "merged": True, "gguf_of": ["adapter"]}])
def test_file_that_llama_cpp_would_serve_must_be_exported(export):
    with pytest.raises(UserError, match=r"serve = llama_cpp: it serves a GGUF file of the form"):
        runs(export=export | {"serve": "llama_cpp"})


def test_without_a_server_all_stages_receive_what_they_did():
    (run,) = runs().values()
    stages = ("consolidate", "convert_gguf", "evaluate_run", "publish_run", "write_card")
    settings = [stage_settings(stage, run) for stage in stages]
    assert not any("serve" in document.get("export", {}) for document in settings)


@pytest.mark.parametrize(
    ("setting", "document"),
    [
        ("export.serve", {"export": {"serve": "vllm"}}),
        ("answers.sampler", {"answers": {"sampler": "vllm"}, "rewards": REWARDS}),
    ],
)
def test_environment_that_is_not_made_is_told_before_anything_runs(
    setting, document, tmp_path, monkeypatch
):
    monkeypatch.setattr(local_inputs, "SERVING", str(tmp_path / "python"))
    (run,) = runs(**document, data={"seq_len": 512}).values()
    with pytest.raises(UserError, match=rf"run demo: {setting} = 'vllm': .* Run make serving"):
        check_local_paths("demo", run)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"use_dora": True}, r"pairs of matrices alone: lora\.use_dora = True"),
        ({"modules_to_save": ["lm_head"]}, r"alone: lora\.modules_to_save = lm_head"),
        ({"r": 600}, r"its largest rank is 512: lora\.r = 600"),
        ({"rank_pattern": {"q_proj": 513}}, r"largest rank is 512: q_proj = 513"),
    ],
)
def test_adapter_that_vllm_refuses_is_refused_with_the_settings(lora, words):
    """As vLLM 0.32 does: it was tried."""
    with pytest.raises(UserError, match=rf"export\.serve = vllm: .*{words}\. Set export\.merged"):
        runs(export={"serve": "vllm"}, lora=lora)
    runs(export={"serve": "vllm", "merged": True}, lora=lora)
    sampling = {"rewards": REWARDS, "data": {"seq_len": 512}, "lora": lora}
    with pytest.raises(UserError, match=rf"answers\.sampler = vllm: .*{words}\. Change it, or set"):
        runs(answers={"sampler": "vllm"}, **sampling)
    runs(**sampling)
