"""Conversations, chat templates and their encoding, for tests."""

from typing import Any

from tests.support.tiny import CHAT_TEMPLATE
from workflow.lib.data.encoding.chat_messages import Conversation
from workflow.lib.data.encoding.sample_encoder import Encoded, SampleEncoder

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the answer?"},
    {"role": "assistant", "content": "Forty-two."},
    {"role": "user", "content": "Why? 五 🦊 "},
    {"role": "assistant", "content": " é"},
]
# ChatML-like, without generation blocks, and with a line feed after each end-of-turn token.
PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + eos_token + '\n' "
    "}}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
OPEN_BLOCKS = CHAT_TEMPLATE.replace(
    "{{ message['content'] + eos_token }}{% endgeneration %}",
    "{{ message['content'] }}{% endgeneration %}{{ eos_token }}",
)


def encode(
    tokenizer: Any, sample: Any, template: str | None = CHAT_TEMPLATE, **options: Any
) -> Encoded:
    options = {"loss_on": "completions", **options}
    sample = conversation(sample) if isinstance(sample, list) else sample
    examples = SampleEncoder(tokenizer, chat_template=template, **options).encode(sample)
    assert len(examples) == 1
    return examples[0]


def conversation(messages: list[Any], **more: Any) -> Conversation:
    return Conversation(messages, [m["role"] == "assistant" for m in messages], **more)


def trained(tokenizer: Any, encoded: Encoded) -> list[str]:
    runs = [[]]
    for token, is_target in zip(encoded.ids.tolist(), encoded.mask, strict=True):
        if is_target:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    return [tokenizer.decode(run) for run in runs if run]


def exchange(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


TOOL_TEMPLATE = (
    "{{ bos_token }}{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}{% for m in "
    "messages %}{{ '<|user|>' if m.role == 'tool' else '<|' + m.role + '|>' }}{% if m.role == "
    "'assistant' %}{% generation %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ "
    "c.function.name ~ c.function.arguments | tojson }}{% endfor %}{{ eos_token }}{% endgeneration "
    "%}{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt "
    "%}{{ '<|assistant|>' }}{% endif %}"
)
