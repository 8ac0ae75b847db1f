"""Secrets in text: masked where they are, and nothing else."""

import pytest

from workflow.lib.settings.config import load_config
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.redaction import holds_secret, redacted, secret_values

TOKEN = "hf_" + "abcdefgh" * 4


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GET https://user:pass@hub.example/a?b=c", "GET https://***@hub.example/a?b=c"),
        ("https://token@hub.example", "https://***@hub.example"),
        (f"given {TOKEN}.", "given ***."),
        ("Authorization: Bearer abc.def-012", "Authorization: Bearer ***"),
        (
            "https://s3.example/k?a=1&X-Amz-Signature=0f9&b=2",
            "https://s3.example/k?a=1&X-Amz-Signature=***&b=2",
        ),
        ("https://cdn.example/k?Signature=0f~9_ now", "https://cdn.example/k?Signature=*** now"),
        ("the bearer of news; tokens?token", "the bearer of news; tokens?token"),
        ("https://hub.example/owner@v2", "https://hub.example/owner@v2"),
        ("mail a@b.example, see http://x.example", "mail a@b.example, see http://x.example"),
        ("hf_transfer", "hf_transfer"),
    ],
)
def test_logins_of_urls_and_hub_tokens_are_masked_and_nothing_else(text: str, shown: str) -> None:
    assert redacted(text) == shown
    assert holds_secret(text) is (text != shown)


def test_values_of_variables_named_like_secrets_are_secrets() -> None:
    environment = {
        "HF_TOKEN": "a-long-value",
        "SOME_APIKEY": "fourth-long-value!!!!",
        "WANDB_API_KEY": "another-long-value",
        "AWS_SECRET_ACCESS_KEY": "third-long-value!!!",
        "MY_PASSWORD": "short",
        "TOKENIZERS_PARALLELISM": "a-long-value-too",
        "PATH": "/usr/bin:/bin",
    }
    values = secret_values(environment)
    assert values == [
        "fourth-long-value!!!!",
        "third-long-value!!!",
        "another-long-value",
        "a-long-value",
    ]
    assert redacted("x another-long-value y", secrets=values) == "x *** y"


def test_message_to_the_user_masks_what_it_quotes() -> None:
    error = setting_error("model.source", "https://me:word@hub.example/m", "it is wrong", "Mend it")
    assert str(error) == "model.source = 'https://***@hub.example/m': it is wrong. Mend it."


@pytest.mark.parametrize("secret", ["https://me:word@hub.example/x", f"x-{TOKEN}"])
def test_setting_with_a_password_is_refused_without_showing_it(secret: str) -> None:
    with pytest.raises(UserError, match="must hold no password or token") as refusal:
        load_config({"data": {"train": secret}, "lora": {"target_modules": [secret]}})
    assert "word" not in str(refusal.value).replace("password", "")
    assert TOKEN not in str(refusal.value)
