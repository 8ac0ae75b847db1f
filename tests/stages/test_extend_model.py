"""The stage as a program: a copy of the model with more tokens, or one message."""

import json

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.support.families import FAMILIES, tiny_model
from tests.support.forked_stage import forked_stage, refusal_of
from tests.support.models import tiny_llama
from tests.support.tiny import VOCAB_SIZE, tiny_tokenizer
from tests.system.test_checksums import recorded_as_download
from workflow.lib.checkpoints.tokenizer import load_tokenizer
from workflow.lib.data.encoding.safe_encoder import SafeEncoder
from workflow.lib.data.reading.hub_download import licence_of
from workflow.lib.model.lora import TRAINED_ROWS
from workflow.lib.system.checksums import check_files, downloaded_files
from workflow.lib.system.files import read_checked_json, read_json

TOKENS = ["<think>", "<|sum|>", "zwölf Türme"]
ADDED = range(VOCAB_SIZE, VOCAB_SIZE + len(TOKENS))


def extend(source, output, tokens=(), **model):
    config = {"model": {"add_tokens": [*tokens], **model}}
    return forked_stage("extend_model", config=config, model=source, output=output)


def original(folder, **model):
    """Write a tiny model to the folder `original`; return that."""
    tiny_llama(folder / "original", **{"dtype": torch.bfloat16, "vocab_size": VOCAB_SIZE} | model)
    tiny_tokenizer(folder / "original")
    return folder / "original"


def extended(folder, tokens=TOKENS, **model):
    """Return a tiny model's folder with more tokens, made of the folder `original` beside it."""
    done = extend(original(folder, **model), folder / "extended", tokens)
    assert done.returncode == 0, done.stderr
    return folder / "extended"


def refused(folder, tokens, *parts):
    output = folder.parent / "extended"
    said = refusal_of(extend(folder, output, tokens), output=output).splitlines()[-1]
    assert all(part in said for part in parts), said


@pytest.fixture(scope="module", params=[VOCAB_SIZE, VOCAB_SIZE + 2, 400])
def vocabulary(request, tmp_path_factory):
    """A model whose embedding has no row to spare, too few, or enough; and its rows."""
    folder = tmp_path_factory.mktemp("extended")
    return extended(folder, vocab_size=request.param), request.param


def test_new_rows_are_the_mean_of_the_tokenizers_and_others_stay(vocabulary):
    folder, old = vocabulary
    before = load_file(folder.parent / "original" / "model.safetensors")
    after = {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}
    assert after.keys() == before.keys()
    tables = {"model.embed_tokens.weight", "lm_head.weight"}
    for name in after.keys() - tables:
        assert torch.equal(after[name], before[name])
    for name in tables:
        assert len(after[name]) == max(old, ADDED.stop)
        kept = [n for n in range(old) if n not in ADDED]
        assert torch.equal(after[name][kept], before[name][kept])
        mean = before[name][:VOCAB_SIZE].double().mean(dim=0).bfloat16()
        assert all(torch.equal(after[name][n], mean) for n in ADDED)
    config = read_json(folder / "config.json")
    assert config["vocab_size"] == max(old, ADDED.stop)
    assert config[TRAINED_ROWS] == [ADDED.start, ADDED.stop]


def test_tied_model_keeps_one_table(tmp_path):
    folder = extended(tmp_path, tied=True)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.weight.shape[0] == ADDED.stop


def test_tokens_are_one_id_each_in_texts_and_templates(vocabulary):
    tokenizer = AutoTokenizer.from_pretrained(vocabulary[0])
    text = "a<think> b<|sum|>zwölf Türme."
    own = load_tokenizer(vocabulary[0].parent / "original")
    expected = [*own.encode("a"), 307, *own.encode(" b"), 308, 309, *own.encode(".")]
    assert tokenizer.encode(text) == expected
    assert SafeEncoder(load_tokenizer(vocabulary[0])).encode_plain(text).ids.tolist() == expected
    tokenizer.chat_template = "{{ '<think>' }}{% for m in messages %}{{ m.content }}{% endfor %}"
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "<|sum|>"}], return_dict=True)
    assert ids["input_ids"] == [307, 308]


def test_stock_peft_resizes_the_model_that_is_named_to_the_same_logits(vocabulary, tmp_path):
    """By the tokenizer beside an adapter whose tokens are trained."""
    folder = vocabulary[0]
    ids = torch.tensor([[5, *ADDED, 9]])
    config = LoraConfig(task_type="CAUSAL_LM", trainable_token_indices={
        "model.embed_tokens": [*ADDED], "lm_head": [*ADDED]
    })  # fmt: skip
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype="float32"), config)
    for name, param in model.named_parameters():
        if "delta" in name:
            torch.nn.init.normal_(param)
    model.save_pretrained(tmp_path)
    written = read_json(tmp_path / "adapter_config.json")
    named = written | {"base_model_name_or_path": str(folder.parent / "original")}
    (tmp_path / "adapter_config.json").write_text(json.dumps(named))
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    stock = AutoPeftModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(stock(ids).logits, model.eval()(ids).logits)


def test_folder_has_the_origin_and_the_checksums_of_a_download(tmp_path):
    recorded_as_download(original(tmp_path))
    done = extend(tmp_path / "original", tmp_path / "extended", TOKENS)
    assert done.returncode == 0, done.stderr
    folders = tmp_path / "original", tmp_path / "extended"
    theirs, own = (read_checked_json(folder / "source.json") for folder in folders)
    assert theirs.keys() == own.keys()
    files = downloaded_files(tmp_path / "extended")
    check_files(files)
    assert {f.name for f in files} == {
        p.name for p in (tmp_path / "extended").iterdir() if p.name != "source.json"
    }


def test_copy_of_a_local_model_keeps_its_licence(tmp_path):
    (tmp_path / "original").mkdir()
    (tmp_path / "original" / "LICENSE.txt").write_text("terms\n")
    (tmp_path / "original" / "README.md").write_text("---\nlicense: mit\n---\n")
    folder = extended(tmp_path)
    assert (folder / "LICENSE.txt").read_text() == "terms\n"
    assert licence_of([folder]) == "mit"


def test_token_that_the_tokenizer_has_is_refused(tmp_path):
    message = "model.add_tokens = '<|user|>': the tokenizer has this token already, with the id 4"
    refused(original(tmp_path), ["<new>", "<|user|>"], message, "Remove it from the list")


def test_model_whose_embedding_is_too_small_already_is_refused(tmp_path):
    folder = original(tmp_path, vocab_size=VOCAB_SIZE - 1)
    refused(folder, TOKENS, "the model has 306 rows for 307 tokens already")


def test_head_with_a_bias_is_refused(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = AutoConfig.for_model("phi", vocab_size=VOCAB_SIZE, num_hidden_layers=1, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "original")
    tiny_tokenizer(tmp_path / "original")
    refused(tmp_path / "original", TOKENS, "the model's output head has a bias")


YARN = {"rope_type": "yarn", "factor": 4}


def test_scaled_model_shares_its_weights_and_has_a_longer_context(tmp_path):
    source, folder = original(tmp_path), tmp_path / "scaled"
    done = extend(source, folder, rope_scaling=YARN)
    assert done.returncode == 0, done.stderr
    weights = [path / "model.safetensors" for path in (source, folder)]
    assert weights[0].samefile(weights[1])
    check_files(downloaded_files(folder))
    config = AutoModelForCausalLM.from_pretrained(folder).config
    assert config.max_position_embeddings == 4 * 128
    assert config.rope_parameters["rope_type"] == "yarn"
    own = AutoConfig.from_pretrained(source)
    assert own.max_position_embeddings == 128
    assert own.rope_parameters["rope_type"] == "default"


def test_tokens_and_positions_go_together(tmp_path):
    folder = tmp_path / "both"
    done = extend(original(tmp_path), folder, TOKENS, rope_scaling=YARN)
    assert done.returncode == 0, done.stderr
    config = AutoModelForCausalLM.from_pretrained(folder).config
    assert (config.vocab_size, config.max_position_embeddings) == (ADDED.stop, 4 * 128)


def test_layers_without_rotary_positions_are_refused(tmp_path):
    config = FAMILIES["granitemoehybrid"].config("granitemoehybrid")
    tiny_tokenizer(tiny_model(config, tmp_path / "original"))
    output = tmp_path / "extended"
    said = refusal_of(extend(tmp_path / "original", output, rope_scaling=YARN), output=output)
    assert "the model's layers use no rotary positions that it scales" in said
