"""Secrets in text: masked where they are, and nothing else."""

import subprocess
import sys

import pytest

from workflow.lib.settings.config import load_config
from workflow.lib.system.errors import UserError, setting_error
from workflow.lib.system.redaction import holds_secret, redacted, secret_values

TOKEN = "hf_" + "abcdefgh" * 4
RANDOM, HEXADECIMAL = "aB3" * 20, "0123456789abcdef" * 2
MADE_UP_TOKENS = [
    *(f"{prefix}{RANDOM}" for prefix in ("sk-ant-api03-x_", "gsk_", "nvapi-a-", "r8_", "xai-")),
    *(f"{prefix}{RANDOM}" for prefix in ("pplx-", "co_", "tgp_v1_", "npm_", "rpa_", "wandb_v1_")),
    *(f"{prefix}{HEXADECIMAL}" for prefix in ("dapi", "dop_v1_", "KGAT_")),
    f"newservice-{RANDOM}",
]


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
        ("postgres://me:w/or@d'\"x@db.example/x now", "postgres://***@db.example/x now"),
        ("Authorization: Basic dXNlcjpwYXNz", "Authorization: Basic ***"),
        ("{'authorization': 'Basic dXNlcjpwYXNz'}", "{'authorization': 'Basic ***'}"),
        ("https://a.example/x?access_token=abc&b=1", "https://a.example/x?access_token=***&b=1"),
        ('{"api_key": "abc"}', '{"api_key": "***"}'),
        ("PGPASSWORD=abcdef psql", "PGPASSWORD=*** psql"),
        (f"given ghp_{'a1' * 18}.", "given ***"),
        (f"given glpat-{'a1b2' * 5}!", "given ***!"),
        (f"given AIza{'Sy-_7' * 7}.", "given ***."),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-def now", "*** now"),
        ("https://hooks.slack.example/services/T0/B0/x", "https://***"),
        ("https://chat.example/api/webhooks/12/ab-cd now", "https://*** now"),
        ("Basic settings, a basic understanding", "Basic settings, a basic understanding"),
        ("pad_token=2, model-00001-of-00001.safetensors",) * 2,
        (f"step-00000016 of {'0f' * 32}",) * 2,
        ("the bearer of news; tokens?token", "the bearer of news; tokens?token"),
        ("https://hub.example/owner@v2", "https://hub.example/owner@v2"),
        ("mail a@b.example, see http://x.example", "mail a@b.example, see http://x.example"),
        ("hf_transfer", "hf_transfer"),
        ("Mistral-Small-24B-Instruct-2501-reasoning-v2-long",) * 2,
        ("Qwen2_5OmniThinkerForConditionalGeneration",) * 2,
        (f"models/tiny-{'0f' * 20}/x, sk-learn and a key-value",) * 2,
        *((f"cannot read {token} now", "cannot read *** now") for token in MADE_UP_TOKENS),
    ],
)
def test_logins_of_urls_and_hub_tokens_are_masked_and_nothing_else(text, shown):
    assert redacted(text) == shown
    assert holds_secret(text) is (text != shown)


def test_values_of_variables_named_like_secrets_are_secrets():
    environment = {
        "HF_TOKEN": "a-long-value",
        "SOME_APIKEY": "fourth-long-value!!!!",
        "WANDB_API_KEY": "another-long-value",
        "AWS_SECRET_ACCESS_KEY": "third-long-value!!!",
        "MY_PASSWORD": "short",
        "SSH_AUTH_SOCK": "/tmp/a-long-path",
        "AWS_WEB_IDENTITY_TOKEN_FILE": "/var/run/a-long-path",
        "PWD": "/home/a-long-path",
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


@pytest.mark.parametrize(
    "name",
    [
        *("PGPASSWORD", "MYSQL_PWD", "CI_PAT", "AZURE_CREDENTIAL", "HF_TOKEN_READ"),
        *("SLACK_WEBHOOK_URL", "DATABASE_URL", "MY_TOKENS", "API_KEY_2", "OPENAI_KEY2", "TOKEN1"),
        *(
            "PRIVATE_KEY_PEM",
            "SSHPASS",
            "AZURE_STORAGE_CONNECTION_STRING",
            "COOKIE",
            "JWT",
            "CREDS",
        ),
    ],
)
def test_variable_of_this_name_holds_a_secret(name):
    values = secret_values({name: "a long & odd value"})
    assert redacted("x a%20long%20%26%20odd%20value y", secrets=values) == "x *** y"


def test_packages_that_know_tokens_are_loaded_only_for_a_text_that_may_hold_one():
    code = (
        "import sys; from workflow.lib.system.redaction import redacted; redacted('step 5 of 10');"
        "assert 'detect_secrets' not in sys.modules; redacted('x' * 20);"
        "assert 'detect_secrets' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "part", ["://a:", "a" * 9, "://", "Bearer ", "password", "webhook/", "eyJ", "ab-"]
)
def test_text_made_to_be_slow_is_redacted(part):
    """A pattern without a bound would take hours, and this test its limit of time."""
    assert redacted(part * (100_000 // len(part)))


def test_message_to_the_user_masks_what_it_quotes():
    error = setting_error("model.source", "https://me:word@hub.example/m", "it is wrong", "Mend it")
    assert str(error) == "model.source = 'https://***@hub.example/m': it is wrong. Mend it."


@pytest.mark.parametrize("secret", ["https://me:word@hub.example/x", f"x-{TOKEN}"])
def test_setting_with_a_password_is_refused_without_showing_it(secret):
    with pytest.raises(UserError, match="must hold no password or token") as refusal:
        load_config({"data": {"train": secret}, "lora": {"target_modules": [secret]}})
    assert "word" not in str(refusal.value).replace("password", "")
    assert TOKEN not in str(refusal.value)
