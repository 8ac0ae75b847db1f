"""The tokenizer's own templates: the default, and the one for conversations with tools."""

import json
from typing import Any

import pytest

from tests.support.encoding import PLAIN_TEMPLATE, TOOL_TEMPLATE, conversation, trained
from tests.support.tiny import tiny_tokenizer
from workflow.lib.checkpoints.tokenizer import (
    load_tokenizer,
    read_chat_template,
    read_tool_template,
    tokenizer_sha256,
    trained_templates,
)
from workflow.lib.data.encoding.probe_conversations import PROBES
from workflow.lib.data.encoding.sample_encoder import SampleEncoder
from workflow.lib.system.errors import UserError

NAMED = {"default": PLAIN_TEMPLATE, "tool_use": TOOL_TEMPLATE, "rag": "{{ messages }}"}
OTHER = PLAIN_TEMPLATE.replace("<|assistant|>", "<|user|>")


def saved(folder, templates):
    tokenizer = tiny_tokenizer(folder, chat_template=False)
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(folder)
    return load_tokenizer(folder)


def test_rows_that_offer_tools_take_the_template_of_that_name(tmp_path):
    tokenizer = saved(tmp_path, NAMED)
    encoder = SampleEncoder(
        tokenizer,
        chat_template=read_chat_template(tokenizer, None),
        tool_template=read_tool_template(tokenizer, None),
        loss_on="completions",
    )
    offered, plain = PROBES[2], conversation(PROBES[0].messages)
    for probe in (offered, plain):
        (encoded,) = encoder.encode(probe)
        tools: Any = probe.tools
        own: Any = tokenizer.apply_chat_template(probe.messages, tools=tools)
        assert encoded.ids.tolist() == own["input_ids"]
    assert trained(tokenizer, encoder.encode(offered)[0]) == ['ping{"host": "a.example"}<|end|>']


def test_template_file_of_the_user_is_for_all_rows(tmp_path):
    tokenizer = saved(tmp_path, NAMED)
    assert read_tool_template(tokenizer, "mine.jinja") is None
    assert trained_templates(tokenizer, OTHER) == OTHER


def test_templates_beside_the_trained_default_are_exported_with_its_arguments(tmp_path):
    tokenizer = saved(tmp_path, NAMED)
    assert trained_templates(tokenizer, PLAIN_TEMPLATE) == NAMED
    head = "{% set thinks = true %}"
    assert trained_templates(tokenizer, head + PLAIN_TEMPLATE) == {
        name: head + text for name, text in NAMED.items()
    }


def test_named_templates_without_a_default_are_told(tmp_path):
    tokenizer = saved(tmp_path, {"tool_use": TOOL_TEMPLATE})
    with pytest.raises(UserError, match="only templates named tool_use, and none named default"):
        read_chat_template(tokenizer, None)


def test_template_of_the_processor_is_taken_where_the_tokenizer_has_none(tmp_path):
    assert saved(tmp_path, None).chat_template is None
    for name, own in [("chat_template.json", "a"), ("processor_config.json", "b")]:
        digest = tokenizer_sha256(tmp_path)
        (tmp_path / name).write_text(json.dumps({"chat_template": own}))
        assert read_chat_template(load_tokenizer(tmp_path), None) == own
        assert tokenizer_sha256(tmp_path) != digest
    (tmp_path / "chat_template.jinja").write_text("c")
    assert load_tokenizer(tmp_path).chat_template == "c"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "processor_config.json").write_text("[]")
    with pytest.raises(UserError, match=r"processor_config\.json is no JSON object"):
        load_tokenizer(tmp_path)


def test_digest_of_a_tokenizer_changes_with_each_named_template(tmp_path):
    saved(tmp_path, NAMED)
    before = tokenizer_sha256(tmp_path)
    saved(tmp_path, {**NAMED, "tool_use": TOOL_TEMPLATE + " "})
    assert tokenizer_sha256(tmp_path) != before
