"""The model card: metadata that the hub reads, and facts that are the run's."""

import dataclasses
import json
import re
import shlex
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id
from markdown_it import MarkdownIt

from tests.support.families import FAMILIES, tiny_model
from tests.support.forked_stage import forked_stage
from tests.support.models import quantized
from tests.support.report_examples import (
    HOSTILE,
    SERVED_CHECK,
    add_forgetting,
    add_gguf,
    add_subject,
    edit,
    quantization,
    write_run,
)
from tests.support.tiny import CHAT_TEMPLATE, tiny_tokenizer
from tests.support.tiny_export import tiny_adapter
from workflow.lib.artifacts.manifest_record import Manifest
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.artifacts.records import GgufChecks, Parity, Quantization
from workflow.lib.artifacts.training_record import Summary
from workflow.lib.checkpoints.adapter import Adapter
from workflow.lib.checkpoints.checkpoint import Checkpoint
from workflow.lib.export.extended_model import write_copy
from workflow.lib.export.stock_models import load_adapter, load_base
from workflow.lib.report.model_card import CardInputs, model_card
from workflow.lib.report.verdict import read_measured
from workflow.lib.settings.config import ModelConfig, QuantizeConfig
from workflow.lib.system.files import read_json, write_json
from workflow.scripts.write_card import stated_positions


def read(folder, **changes):
    tokens = folder.parents[1] / "tokens" / f"{folder.name}-data"
    inputs = CardInputs(
        model_id="acme/tiny-1b",
        revision="c0ffee",
        adapter_config={"r": 16, "lora_alpha": 32.0},
        dataset_id="acme/questions",
        dataset="questions",
        quantization=Quantization(**quantization()),
        summary=read_record(folder / "finetune" / "summary.json", Summary),
        manifest=read_record(tokens / "manifest.json", Manifest),
        parity=read_record(folder / "consolidate" / "parity.json", Parity),
        measured=read_measured(folder / "evaluate_run", run=folder.name),
    )
    return dataclasses.replace(inputs, **changes)


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path, "demo", num_steps=3)


def test_metadata_is_read_back_by_the_hubs_own_parser(run, tmp_path):
    (tmp_path / "README.md").write_text(model_card(read(run)))
    data = ModelCard.load(tmp_path / "README.md").data
    found = {key: value for key, value in data.to_dict().items() if key != "model-index"}
    assert found == {
        "base_model": "acme/tiny-1b",
        "base_model_relation": "adapter",
        "datasets": "acme/questions",
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["lora", "qlora", "fsdp"],
    }
    validate_repo_id(found["base_model"])
    validate_repo_id(found["datasets"])


def test_results_are_in_the_hubs_terms_unrounded(run):
    data = ModelCard(model_card(read(run))).data
    results = {(r.dataset_type, r.metric_type): r.metric_value for r in data.eval_results}
    assert data.model_name == "demo"
    assert results == {
        ("acme/questions", "loss"): 1.5123456789,
        ("acme/questions", "perplexity"): 4.5373,
        ("pydocs_mc", "acc"): 0.6137,
        ("pydocs_mc", "acc_norm"): 0.6331,
    }


def test_no_path_of_the_machine_is_published(run):
    edit(
        run / "finetune" / "summary.json",
        lambda d: d["settings"]["model"].update(source="/home/alice/models/x"),
    )
    manifest = run.parents[1] / "tokens" / f"{run.name}-data" / "manifest.json"
    edit(manifest, lambda d: d["sources"][0].update(file="/home/alice/data/train.jsonl"))
    text = model_card(read(run, model_id=None, revision=None, dataset_id=None))
    assert "alice" not in text
    for result in ModelCard(text).data.eval_results:
        validate_repo_id(result.dataset_type)  # the hub takes no other name
    assert "| Files | <code>train.jsonl</code> (2,003 rows) |" in text
    assert "`path/to/base` is the folder of <code>base-8b</code>." in text
    assert "`adapter_config.json` names the base by its path on the machine" in text


@pytest.mark.parametrize(
    "line",
    [
        "# demo",
        "| Rows | 1,997 trained, 1,997 held out, 12 dropped |",
        r"| Adapter | LoRA, rank 16, alpha 32, targets <code>q\_proj</code>, <code>v\_proj</code> "
        r"|",
        "| Optimizer steps | 3 of 17 rows of 257 tokens |",
        "| Export check | logits of the reloaded adapter differ from the trained model's by 0.0078 "
        "(root mean square, tolerance 0.05) at 513 positions |",
        r"| loss on 127 held-out documents, nats per token | 2.9877 \[2.8801, 3.0912\] | 1.5123 "
        r"\[1.4511, 1.5732\] | +1.4753 \[1.3711, 1.5802\], p &lt; 0.001 |",
        r"| pydocs\_mc, acc, 331 items | 0.2519 | 0.6137 | +0.3618 \[0.3021, 0.4214\] |",
        "| measured | NF4 base | tuned | difference |",
        "| Chat template | <code>chat_template.jinja</code>, in this folder, with "
        r"<code>enable\_thinking = False</code> unless told otherwise |",
        "    'acme/tiny-1b',",
        "    revision='c0ffee',",
        "        bnb_4bit_use_double_quant=True,",
    ],
)
def test_card_states_the_runs_facts(run, line):
    assert line in model_card(read(run)).splitlines()


def test_card_tells_what_the_adapter_continues(run):
    before = [{"adapter": "acme/chat"}, {"run": "sft", "data": "chats", "objective": "sft"}]
    assert "| Continues |" not in model_card(read(run))
    edit(run / "finetune" / "summary.json", lambda d: d.update(lineage=before))
    assert (
        "| Continues | <code>acme/chat</code> → <code>run sft: sft on chats</code> → this adapter, "
        "on the same base |" in model_card(read(run)).splitlines()
    )


@pytest.mark.parametrize("rise", [0.125, 0.0])
def test_card_has_the_loss_of_other_texts_and_warns_of_a_worse_one(run, rise):
    assert "texts of other kinds" not in model_card(read(run))
    add_forgetting(run, rise)
    text = model_card(read(run))
    assert "| loss on 40 texts of other kinds (code, prose) | 2.0000 \\[1.7500, 2.2500\\] |" in text
    assert (
        "- The tuned model got worse at texts of other kinds: \\+0.1250 \\[\\+0.0938, \\+0.1562\\] "
        "nats per token against the NF4 base." in text
    ) is (rise > 0)


BETTER, WORSE, UNCLEAR, UNJUDGED = (
    r"- Better than the NF4 base, by the 95% interval: pydocs\_mc {}.",
    r"- Worse than the NF4 base, by the 95% interval: pydocs\_mc {}.",
    r"- No clear change against the NF4 base: pydocs\_mc {}.",
    r"- Not judged, for want of an interval or of a direction: pydocs\_mc {}.",
)
GAIN, LOSS, NEITHER = [0.033, 0.2], [-0.2, -0.033], [-0.02, 0.04]


@pytest.mark.parametrize(
    ("acc", "acc_norm", "upwards", "told"),
    [
        (GAIN, NEITHER, True, {"acc": BETTER, r"acc\_norm": UNCLEAR}),
        (NEITHER, LOSS, True, {"acc": UNCLEAR, r"acc\_norm": WORSE}),
        (LOSS, None, False, {"acc": BETTER, r"acc\_norm": UNJUDGED}),
        (GAIN, LOSS, None, {r"acc, pydocs\_mc acc\_norm": UNJUDGED}),
    ],
)
def test_each_metric_of_a_task_is_told_by_its_own_interval(run, acc, acc_norm, upwards, told):
    def change(document):
        for metric, ends in (("acc", acc), ("acc_norm", acc_norm)):
            document["comparisons"]["base"]["tasks"]["pydocs_mc"][metric].update(
                difference_ci95=ends
            )
            document["tasks"]["pydocs_mc"]["metrics"][metric].update(higher_is_better=upwards)

    edit(run / "evaluate_run" / "tuned.json", change)
    lines = model_card(read(run)).splitlines()
    sentences = [line for line in lines if "NF4 base" in line or "Not judged" in line]
    found = {line for line in sentences if line.startswith("- ") and "pydocs" in line}
    assert found == {sentence.format(metric) for metric, sentence in told.items()}


WHOLE_BLOCKS = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


SCALED = {"rope_scaling": {"rope_type": "yarn", "factor": 4}}


def used(card, **replaced):
    """Run the card's last block of Python, with these folders; return its names."""
    block = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[-1]
    for placeholder, path in replaced.items():
        quoted = f"path/to/{placeholder.replace('__', '/')}"
        assert quoted in block
        block = block.replace(quoted, str(path))
    names: dict[str, Any] = {}
    exec(block, names)
    return names


@pytest.mark.parametrize(
    ("family", "quantize"),
    [
        ("llama", {}),
        ("llama", {"double_quant": False, "block_size": 128}),
        ("mistral3", {}),
        ("mixtral", {}),
        ("llama in NF4", {}),
        ("llama in words", {}),
        ("llama in longer rows", {}),
        ("mistral3 in longer rows", {"method": "none"}),
        ("llama", {"method": "none"}),
        ("llama", {"keep": ["down_proj", r"layers\.0"]}),
        ("mixtral", {"keep": ["experts", "q_proj"]}),
    ],
    ids=[
        "usual",
        "single and wide",
        "multimodal",
        "experts",
        "original in NF4",
        "said to be",
        "scaled positions",
        "scaled and multimodal",
        "16 bits",
        "some in 16 bits",
        "experts in 16 bits",
    ],
)
def test_card_loads_what_was_evaluated(run, tmp_path, family, quantize):
    """Bit for bit: the NF4 weights, the types, and the adapter; so are the logits. Rows are whole
    blocks: others stock packages misread."""
    family, _, packed = family.partition(" in ")
    config = FAMILIES[family].config(family)
    for name, size in WHOLE_BLOCKS.items():
        setattr(config.get_text_config(), name, size)
    model = tiny_model(config, tmp_path / "model", dtype=torch.bfloat16)
    if packed == "NF4":
        model = quantized(model, tmp_path / "packed")
    elif packed == "words":
        said = {"quantization_config": {"quant_method": "fp8"}}
        write_json(model / "config.json", read_json(model / "config.json") | said)
    nf4, adapter = tmp_path / "nf4", tmp_path / "adapter"
    settings = {"quantize": QuantizeConfig(**quantize).model_dump(mode="json")}
    scaling = ModelConfig.model_validate(SCALED if packed == "longer rows" else {})
    source = model
    if packed == "longer rows":
        source = tmp_path / "scaled"
        source.mkdir()
        write_copy(Checkpoint.open(model), source, scaling)
    done = forked_stage(
        "quantize_base", config=settings, model=source, output=nf4, log=tmp_path / "log.txt"
    )
    assert done.returncode == 0, done.stderr
    facts = read_record(nf4 / "quantization.json", Quantization)
    tiny_tokenizer(adapter)
    write_json(adapter / "generation_config.json", {"eos_token_id": [2, 4]})
    told: dict[str, Any] = {"compute_dtype": torch.bfloat16, "attention": "eager"}
    told["device"] = torch.device("cpu")
    tiny_adapter(load_base(Checkpoint(nf4), **told), adapter)
    evaluated = load_adapter(load_base(Checkpoint(nf4), **told), Adapter(adapter))
    changes = {"model_id": None, "revision": None, "quantization": facts}
    changes["overrides"] = stated_positions(scaling, nf4)
    base = {"nf4__base": nf4} if facts.only_here else {"base": model}
    loaded = used(model_card(read(run, **changes)), **base, this__folder=adapter)
    ids = torch.arange(5, 40)[None]
    for module in loaded["model"].modules():
        if isinstance(module, Linear4bit):  # on some CPUs it computes in bf16 alone
            module.support_avx512bf16_for_cpu = False
    with torch.no_grad():
        loaded["model"].set_attn_implementation("eager")
        assert torch.equal(loaded["model"](ids).logits, evaluated(ids).logits)
    expected, found = (dict(m.named_parameters()) for m in (evaluated, loaded["model"]))
    assert found.keys() == expected.keys()
    assert {n for n in found if not torch.equal(found[n], expected[n])} == set()
    assert {n for n in found if found[n].dtype != expected[n].dtype} == set()
    assert loaded["model"].generation_config.eos_token_id == [2, 4]
    assert loaded["tokenizer"].chat_template == CHAT_TEMPLATE


def test_run_that_measured_nothing_says_so(run):
    for subject in ("base", "tuned"):
        edit(run / "evaluate_run" / f"{subject}.json", lambda d: d.update(heldout=None, tasks={}))
    nothing = {"loss_difference": None, "loss_difference_ci95": None, "p_value": None, "tasks": {}}
    edit(run / "evaluate_run" / "tuned.json", lambda d: d["comparisons"]["base"].update(nothing))
    text = model_card(read(run))
    assert "Nothing was measured." in text
    assert "model-index" not in ModelCard(text).data.to_dict()


def test_hostile_text_is_neither_markup_nor_metadata(run):
    hostile = f"{HOSTILE} | [a](http://x.example) **b**\n---\nlicense: mit\n# c"
    edit(
        run / "finetune" / "summary.json",
        lambda d: (d["settings"]["model"].update(source=hostile), d.update(device_name=hostile)),
    )
    for subject in ("base", "tuned"):
        edit(
            run / "evaluate_run" / f"{subject}.json",
            lambda d: d.update(tasks={hostile: d["tasks"].pop("pydocs_mc")}),
        )
    edit(
        run / "evaluate_run" / "tuned.json",
        lambda d: d["comparisons"]["base"].update(
            tasks={hostile: d["comparisons"]["base"]["tasks"]["pydocs_mc"]}
        ),
    )
    text = model_card(read(run))
    assert "license" not in ModelCard(text).data.to_dict()
    page = MarkdownIt("commonmark", {"html": True}).enable("table").render(ModelCard(text).text)
    assert not [tag for tag in ("<script", "<img", "<a ", "<strong", "\x1b") if tag in page]
    assert page.count("<h1>") == 1


def serving(inputs):
    return model_card(inputs).partition("## Serving\n\n")[2].partition("\n## ")[0]


def merged_too(run):
    """Export and serve the merged model of a run as well."""
    edit(run / "evaluate_run" / "tuned.json", lambda document: document.update(served=False))
    add_subject(run, "merged", loss=1.5)
    edit(run / "evaluate_run" / "merged.json", lambda document: document.update(served=True))


def test_card_of_a_merged_run_loads_the_adapter_too(run, tmp_path):
    merged_too(run)
    tiny_model(FAMILIES["llama"].config("llama"), tmp_path / "model", dtype=torch.bfloat16)
    tiny_tokenizer(tmp_path / "adapter")
    write_json(tmp_path / "adapter" / "generation_config.json", {"eos_token_id": [2, 4]})
    how: dict[str, Any] = {"compute_dtype": torch.bfloat16, "attention": "sdpa"}
    how["device"] = torch.device("cpu")
    tiny_adapter(load_base(Checkpoint(tmp_path / "model"), **how), tmp_path / "adapter")
    card = model_card(read(run, model_id=None, revision=None))
    assert 'folder = "path/to/merged"' in card
    assert "`path/to/base` is the folder of" in card
    loaded = used(card, base=tmp_path / "model", this__folder=tmp_path / "adapter")
    ids = torch.arange(5, 40)[None]
    with torch.no_grad():
        evaluated = load_adapter(
            load_base(Checkpoint(tmp_path / "model"), **how), Adapter(tmp_path / "adapter")
        )
        assert torch.equal(loaded["model"](ids).logits, evaluated(ids).logits)


def test_command_is_the_one_that_was_run_and_cost_is_told(run):
    text = serving(read(run, checked=SERVED_CHECK))
    assert (
        "vllm serve acme/tiny-1b --tokenizer path/to/this/folder --enable-lora --max-lora-rank 32 "
        "--lora-modules demo=path/to/this/folder\n"
    ) in text
    assert "held-out loss is 1.5200 nats per token, +0.0200 against the adapter" in text
    assert "100.0% of the adapter's change of log-probabilities" in text


def test_command_for_scaled_positions_has_them(run):
    stated = {"rope_parameters": {"rope_type": "yarn"}, "max_position_embeddings": 512}
    text = serving(read(run, checked=SERVED_CHECK, overrides=stated))
    options = shlex.split(text.split("```bash")[1].split("```")[0])
    assert json.loads(options[options.index("--hf-overrides") + 1]) == stated


def test_command_for_an_adapter_on_experts_has_its_option_and_its_mark(run):
    inputs = read(run, checked=SERVED_CHECK)
    on_experts = inputs.adapter_config | {"target_parameters": ["mlp.experts.gate_up_proj"]}
    text = serving(dataclasses.replace(inputs, adapter_config=on_experts))
    assert (
        "--max-lora-rank 32 --enable-mixed-moe-lora-format --lora-modules "
        """'{"name": "demo", "path": "path/to/this/folder", "is_3d_lora_weight": true}'\n"""
    ) in text


def test_loss_of_the_served_model_stands_first(run):
    card = model_card(read(run, checked=SERVED_CHECK))
    opening = card.partition("trained with FSDP-QLoRA. ")[2]
    assert opening.startswith("Served by vLLM 9.9 (tuned on original, float32), its held-out loss")


def test_merged_model_is_served_as_it_is_and_what_was_not_tried_has_no_command(run):
    assert serving(read(run)) == "No server was tried (`export.serve`).\n"
    change = {"subject": "merged", "max_lora_rank": None, "adapter": None, "trained_loss": None}
    text = serving(read(run, checked=SERVED_CHECK.model_copy(update=change)))
    assert "vllm serve path/to/merged\n" in text
    assert "against the adapter" not in text


def test_card_has_a_command_for_each_gguf_form_with_losses_their_bound_and_sizes(run):
    assert "## GGUF" not in model_card(read(run))
    add_gguf(run)
    checks = read_record(run / "convert_gguf" / "gguf.json", GgufChecks)
    text = model_card(read(run, gguf=checks))
    assert "llama-server -m demo-q4_k_m.gguf --jinja\n" in text
    assert "llama-server -m demo-base-q4_k_m.gguf --lora demo-adapter.gguf --jinja\n" in text
    merged, apart = (line for line in text.splitlines() if line.startswith("| <code>demo-"))
    figures = ["3.00 MiB", "1.5625", "1.5000", "+0.0625 (at most 0.3)", "96", "1 of 4 |"]
    assert merged.split(" | ") == [r"| <code>demo-q4\_k\_m.gguf</code>", *figures]
    assert apart.startswith("| <code>demo-base")
    assert "4.00 MiB" in apart, "the base and the adapter"
